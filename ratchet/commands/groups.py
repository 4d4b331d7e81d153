"""The commands that read groups: attempts at the same thing, compared with each other. They change nothing."""

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
    """Look at groups: which attempts were compared, what they scored, and what became of them.

    \b
    Example:
      ratchet groups list --state dropped
    """


@groups.command("list")
@click.option(
    "--state",
    type=click.Choice(["ready", "judged", "trained", "dropped"]),
    help="In this state: ready waits for the judge.",
)
@click.option("--reason", metavar="REASON", help="Dropped for this reason, such as no_variance.")
@options.alias
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="The newest so many.")
@click.option("--before", metavar="ID", help="Older ones than this group: the next page.")
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
    """List the groups that fit every option, newest first, with their members' scores or why they were dropped.

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
            click.echo(f"older ones: --before {found[-1].id}", err=True)
    else:
        click.echo("no such group: either no two attempts were compared yet, or no group fits every option")


@groups.command()
@click.argument("group_id", metavar="GROUP")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def show(context: click.Context, group_id: str, store: str | None, project: str | None, as_json: bool) -> None:
    """Show one group: its members, each with its score and what the judge said.

    `ratchet judge show GROUP` shows what a language model was asked about it, word for word.

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

    told: dict[str, Any] = msgspec.to_builtins(group)
    return told | {
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
        said = f"{verdict.judge}: {verdict.failure or verdict.explanation}" if verdict else "no verdict yet"
        yield f"  {name}  {format_score(verdict) or '-'}  {said}".rstrip(": ")


def compared_by(key: str) -> str:
    """Return in words what the members of a group have in common; `key` is how the trainer found them."""
    kind, _, name = key.partition(":")
    return f"task {name}" if kind == "task" else "the same first prompt and tools" if kind == "root" else key
