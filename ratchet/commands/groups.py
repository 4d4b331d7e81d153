"""The `ratchet groups` commands: list and show groups of trajectories. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output.terminal import print_records, strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.records import Group, Verdict

_COLUMNS = ("group", "formed (UTC)", "state", "members", "scores", "compared by")


@click.group()
def groups() -> None:
    """Show groups: the trajectories that were compared, their scores, and the outcome.

    \b
    Example:
      ratchet groups list --state dropped
    """


@groups.command("list")
@click.option(
    "--state",
    type=click.Choice(["ready", "judged", "trained", "dropped"]),
    help="Only groups in this state; ready: waiting for the judge.",
)
@click.option("--reason", metavar="REASON", help="Only groups dropped for this reason, such as no_variance.")
@options.alias
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Maximum number.")
@click.option("--before", metavar="ID", help="Older than this group: the next page.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_groups(
    context: click.Context,
    /,
    state: str | None,
    reason: str | None,
    model: str | None,
    limit: int,
    before: str | None,
    store: str | None,
    project: str | None,
    as_json: bool,
) -> None:
    """List the groups that match every option, newest first, with scores or the reason for dropping.

    \b
    Example:
      ratchet groups list --state dropped --reason no_variance
      ratchet groups list --json
    """
    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.groups.page(limit, before, state=state, alias=model, drop_reason=reason)
        verdicts = opened.groups.verdicts([name for group in found for name in group.members])
    if as_json:
        options.print_json([_plain(group, verdicts) for group in found])
    elif found:
        print_records(_COLUMNS, (_cells(group, verdicts) for group in found))
        if len(found) == limit:
            click.echo(f"next page: --before {found[-1].id}", err=True)
    else:
        click.echo("no group matches")


@groups.command()
@click.argument("group_id", metavar="GROUP")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def show(context: click.Context, group_id: str, store: str | None, project: str | None, as_json: bool) -> None:
    """Show one group: each member with its score and the judge's explanation.

    `ratchet judge show GROUP` also prints the requests to a language model.

    \b
    Example:
      ratchet groups show grp_01J8
    """
    with options.open_project_store(context, store=store, project=project) as opened:
        group = opened.groups.get(group_id)
        verdicts = opened.groups.verdicts(group.members)
    if as_json:
        options.print_json(_plain(group, verdicts))
        return
    for line in _lines(group, verdicts):
        click.echo(strip_control_characters(line))


def _plain(group: Group, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    import msgspec

    content: dict[str, Any] = msgspec.to_builtins(group)
    return content | {
        "verdicts": {name: msgspec.to_builtins(verdicts[name]) for name in group.members if name in verdicts}
    }


def _state(group: Group) -> str:
    return f"{group.state}: {group.drop_reason}" if group.drop_reason else str(group.state)


def _cells(group: Group, verdicts: Mapping[str, Verdict]) -> tuple[Any, ...]:
    from ratchet.commands.trajectories import format_score
    from ratchet.output.terminal import format_time

    scores = ", ".join(format_score(verdicts.get(name)) or "-" for name in group.members)
    formed = format_time(group.formed_at)
    return group.id, formed, _state(group), len(group.members), scores, compared_by(group.key)


def _lines(group: Group, verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    from ratchet.commands.trajectories import format_score
    from ratchet.output.terminal import format_time

    yield f"{group.id}  {group.alias}  {_state(group)}  formed {format_time(group.formed_at)}"
    yield f"  compared by {compared_by(group.key)}"
    for name in group.members:
        verdict = verdicts.get(name)
        judgement = f"{verdict.judge}: {verdict.failure or verdict.explanation}" if verdict else "no verdict yet"
        yield f"  {name}  {format_score(verdict) or '-'}  {judgement}".rstrip(": ")


def compared_by(key: str) -> str:
    """Describe what the members of a group have in common; `key` is the trainer's group key."""
    kind, _, name = key.partition(":")
    return f"task {name}" if kind == "task" else "the same first prompt and tools" if kind == "root" else key
