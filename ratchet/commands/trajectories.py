"""The `ratchet trajectories` and `ratchet groups` commands: list and show what was recorded and compared. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import format_time, plain, prints_json, show

if TYPE_CHECKING:
    from ratchet.store.records import Group, Trajectory, Transcript, Verdict
    from ratchet.store.store import Store

_TRAJECTORY_COLUMNS = ("trajectory", "opened (UTC)", "version", "state", "calls", "score", "task")
_GROUP_COLUMNS = ("group", "formed (UTC)", "state", "members", "scores", "compared by")


def _paged(noun: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a list of pages to a command."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        before = click.option("--before", metavar="ID", help=f"Older than this {noun}: the next page.")
        command = before(options.as_json(options.with_store(command)))
        return options.number("--limit", 20, "Maximum number.", most=1000)(command)

    return add


def _show_page(data: Sequence[dict[str, Any]], rows: Iterable[Any], columns: Sequence[str]) -> None:
    show(data, rows, columns=columns, empty=f"no {columns[0]} matches")
    if not prints_json() and len(data) == click.get_current_context().params["limit"]:
        click.echo(f"next page: --before {data[-1]['id']}", err=True)


@click.group()
def trajectories() -> None:
    """List and show recorded trajectories; `ratchet store export` writes them to files.

    \b
    Example:
      ratchet trajectories list --state dropped
    """


@trajectories.command("list")
@options.trajectory_filters
@_paged("trajectory")
def list_trajectories(store: Store, limit: int, before: str | None, **chosen: Any) -> None:
    """List the trajectories that match every option, newest first, with score or drop reason.

    \b
    Example:
      ratchet trajectories list --state dropped --limit 5
      ratchet trajectories list --task math/17 --json
    """
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    found = store.trajectories.page(limit, before, chosen=TrajectoryFilter(**chosen))
    if not found and before is None:
        options.check_listed_alias(store, chosen["alias"])
    verdicts = store.groups.verdicts([run.id for run in found])
    judged = [(run, verdicts.get(run.id)) for run in found]
    _show_page(
        [plain(run, score=one and one.score, judge=one and one.judge) for run, one in judged],
        (_trajectory_cells(run, one) for run, one in judged),
        _TRAJECTORY_COLUMNS,
    )


def _trajectory_cells(run: Trajectory, verdict: Verdict | None) -> tuple[Any, ...]:
    version = f"{run.alias}@{run.version}"
    score = _score(verdict) if verdict else ""
    return run.id, format_time(run.opened_at), version, _state(run), run.calls, score, run.task or ""


def _score(verdict: Verdict | None) -> str:
    return "-" if verdict is None or verdict.score is None else f"{verdict.score:.3g}"


def _state(found: Trajectory | Group) -> str:
    return f"{found.state}: {found.drop_reason}" if found.drop_reason else str(found.state)


@trajectories.command("show")
@click.argument("trajectory", metavar="TRAJECTORY")
@options.as_json
@options.with_store
def show_trajectory(store: Store, trajectory: str) -> None:
    """Show one trajectory: its complete messages, its calls and how they were linked, its score.

    \b
    Example:
      ratchet trajectories show traj_01J8
    """
    from ratchet.trainer.rows.trajectory_export import Exported, trajectory_record

    found = store.trajectories.read(trajectory)
    verdict = store.groups.verdicts([trajectory]).get(trajectory)
    exported = Exported(found, store.trajectories.context_calls(found), verdict, None)  # without the advantage
    show(trajectory_record(exported), _transcript_lines(found, verdict))


def _transcript_lines(found: Transcript, verdict: Verdict | None) -> Iterator[str]:
    from ratchet.trainer.rows.trajectory_export import chat

    run = found.trajectory
    yield f"{run.id}  {run.alias}@{run.version}  {run.state}  opened {format_time(run.opened_at)}  {run.purpose}"
    for name, value in (("task", run.task), ("group", run.group_id), ("dropped", run.drop_reason)):
        if value:
            yield f"  {name:<8} {value}"
    if verdict is not None:
        yield f"  {'score':<8} {_score(verdict)} by {verdict.judge}: {verdict.explanation}"
    for call in found.calls:
        tokens = f"{call.prompt_tokens} + {call.completion_tokens} tokens"
        parts = (call.id, str(call.state), f"status {call.status}", call.dialect, f"linked by {call.linked_by}")
        untrainable = f", untrainable: {call.untrainable}" if call.untrainable else ""
        yield f"  {'call':<8} {', '.join(parts)}, context {call.context}, {tokens}{untrainable}"
    for message in found.messages:
        turn = chat(message)
        yield f"\n[{turn['role']}] {turn['content'] or ''}".rstrip()
        for called in turn["tool_calls"] or ():
            yield f"  -> {called['function']['name']}({called['function']['arguments']})"


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
@options.only_agent
@_paged("group")
def list_groups(
    store: Store, limit: int, before: str | None, state: str | None, reason: str | None, model: str | None
) -> None:
    """List the groups that match every option, newest first, with scores or the reason for dropping.

    \b
    Example:
      ratchet groups list --state dropped --reason no_variance
      ratchet groups list --json
    """
    found = store.groups.page(limit, before, state=state, alias=model, drop_reason=reason)
    latest = store.groups.verdicts([name for group in found for name in group.members])
    judged = [(group, {name: latest[name] for name in group.members if name in latest}) for group in found]
    _show_page(
        [plain(group, verdicts=verdicts) for group, verdicts in judged],
        (_group_cells(group, verdicts) for group, verdicts in judged),
        _GROUP_COLUMNS,
    )


@groups.command("show")
@click.argument("group_id", metavar="GROUP")
@options.as_json
@options.with_store
def show_group(store: Store, group_id: str) -> None:
    """Show one group: each member with its score and the judge's explanation.

    `ratchet judge show GROUP` also prints the requests to a language model.

    \b
    Example:
      ratchet groups show grp_01J8
    """
    group = store.groups.get(group_id)
    verdicts = store.groups.verdicts(group.members)
    show(plain(group, verdicts=verdicts), _group_lines(group, verdicts))


def _group_cells(group: Group, verdicts: dict[str, Verdict]) -> tuple[Any, ...]:
    scores = ", ".join(_score(verdicts.get(name)) for name in group.members)
    return group.id, format_time(group.formed_at), _state(group), len(group.members), scores, _compared_by(group.key)


def _group_lines(group: Group, verdicts: dict[str, Verdict]) -> Iterator[str]:
    yield f"{group.id}  {group.alias}  {_state(group)}  formed {format_time(group.formed_at)}"
    yield f"  compared by {_compared_by(group.key)}"
    for name in group.members:
        verdict = verdicts.get(name)
        judgement = f"{verdict.judge}: {verdict.explanation}" if verdict else "no verdict yet"
        yield f"  {name}  {_score(verdict)}  {judgement}".rstrip(": ")


def _compared_by(key: str) -> str:
    """Describe what the members of a group have in common; `key` is the trainer's group key."""
    kind, _, name = key.partition(":")
    return f"task {name}" if kind == "task" else "the same first prompt and tools" if kind == "root" else key
