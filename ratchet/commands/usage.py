"""The `ratchet usage` command: calls and tokens by key, agent, purpose and day. It reads the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output.terminal import print_records

if TYPE_CHECKING:
    from ratchet.store.operation_records import Usage

_COLUMNS = {"key": "key_id", "agent": "alias", "day": "day", "purpose": "purpose"}
_NO_KEY = "(no key)"


@click.command()
@click.option(
    "--days", type=click.IntRange(1, 400), default=30, show_default=True, help="Number of UTC days, today included."
)
@click.option(
    "--by", "columns", type=click.Choice(list(_COLUMNS)), multiple=True, default=("key", "agent"), show_default=True,
    help="Column; repeat for more. Models of `model_list` count as agents.",
)  # fmt: skip
@click.option("--agent", "alias", metavar="NAME", help="Only this agent, or model of `model_list`.")
@click.option("--key", "key_id", metavar="ID", help="Only this key.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def usage(
    context: click.Context,
    days: int,
    columns: tuple[str, ...],
    alias: str | None,
    key_id: str | None,
    store: str | None,
    project: str | None,
    as_json: bool,
) -> None:
    """Show calls, failed calls and tokens of the last days, by key and agent.

    Every recorded call counts once it has ended and is in the store. Deleted trajectories stay counted.

    \b
    Example:
      ratchet usage --days 7
      ratchet usage --by key --by day --json
    """
    import msgspec

    from ratchet.store.errors import RecordNotFound

    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.usage.read(days, [_COLUMNS[name] for name in columns], alias, key_id)
        if key_id and not found and all(key.id != key_id for key in opened.keys.all()):
            raise RecordNotFound(f"no key {key_id}; `ratchet keys list` shows the ids")
    if as_json:
        options.print_json([msgspec.structs.asdict(one) for one in found])
    elif found:
        names = tuple(dict.fromkeys(columns))
        rows = (_cells(one, names) for one in found)
        print_records((*names, "calls", "failed", "prompt tokens", "completion tokens"), rows)
    else:
        click.echo(f"no call has ended in the last {days} days")


def _cells(one: Usage, columns: tuple[str, ...]) -> tuple[Any, ...]:
    texts = (_key(one) if name == "key" else getattr(one, _COLUMNS[name]) for name in columns)
    return (*texts, one.calls, one.failed, f"{one.prompt_tokens:,}", f"{one.completion_tokens:,}")


def _key(one: Usage) -> str:
    if not one.key_id:
        return _NO_KEY
    return f"{one.key_id} {one.key_name}" if one.key_name else one.key_id
