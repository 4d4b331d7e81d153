"""The `ratchet trajectories` commands: list and show trajectories. Read-only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.options import trajectory_filters
from ratchet.output.terminal import print_records, strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.records import Call, Trajectory, Transcript, Verdict
    from ratchet.store.store import Store

_COLUMNS = ("trajectory", "opened (UTC)", "version", "state", "calls", "score", "task")


@click.group()
def trajectories() -> None:
    """List and show recorded trajectories; `ratchet store export` writes them to files.

    \b
    Example:
      ratchet trajectories list --state dropped
    """


@trajectories.command("list")
@trajectory_filters
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Maximum number.")
@click.option("--before", metavar="ID", help="Older than this trajectory: the next page.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def list_trajectories(
    context: click.Context,
    /,
    limit: int,
    before: str | None,
    store: str | None,
    project: str | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """List the trajectories that match every option, newest first, with score or drop reason.

    \b
    Example:
      ratchet trajectories list --state dropped --limit 5
      ratchet trajectories list --task math/17 --json
    """
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter

    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.trajectories.page(limit, before, chosen=TrajectoryFilter(**chosen))
        if not found and before is None:
            options.check_listed_alias(opened, chosen["alias"])
        verdicts = opened.groups.verdicts([run.id for run in found])
    if as_json:
        options.print_json([_plain(run, verdicts.get(run.id)) for run in found])
    elif found:
        print_records(_COLUMNS, (_cells(run, verdicts.get(run.id)) for run in found))
        if len(found) == limit:
            click.echo(f"next page: --before {found[-1].id}", err=True)
    else:
        click.echo("no trajectory matches")


def _plain(run: Trajectory, verdict: Verdict | None) -> dict[str, Any]:
    import msgspec

    fields = msgspec.structs.asdict(run) | {"draw": msgspec.structs.asdict(run.draw) if run.draw else None}
    return fields | {"score": verdict.score if verdict else None, "judge": verdict.judge if verdict else None}


def _cells(run: Trajectory, verdict: Verdict | None) -> tuple[Any, ...]:
    from ratchet.output.terminal import format_time

    state = f"{run.state}: {run.drop_reason}" if run.drop_reason else str(run.state)
    version = f"{run.alias}@{run.version}"
    return run.id, format_time(run.opened_at), version, state, run.calls, format_score(verdict), run.task or ""


def format_score(verdict: Verdict | None) -> str:
    """Format a verdict's score; `failed` if there is none."""
    if verdict is None:
        return ""
    return "failed" if verdict.score is None else f"{verdict.score:.3g}"


@trajectories.command()
@click.argument("trajectory_id", metavar="TRAJECTORY")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def show(context: click.Context, trajectory_id: str, store: str | None, project: str | None, as_json: bool) -> None:
    """Show one trajectory: its complete messages, its calls and how they were linked, its score.

    \b
    Example:
      ratchet trajectories show traj_01J8
    """
    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.trajectories.read(trajectory_id)
        verdict = opened.groups.verdicts([trajectory_id]).get(trajectory_id)
        if as_json:
            options.print_json(_record(opened, found, verdict))
            return
    for line in _lines(found, verdict):
        click.echo(strip_control_characters(line))


def _record(store: Store, found: Transcript, verdict: Verdict | None) -> dict[str, Any]:
    """Return the record that `ratchet store export` writes, without the advantage."""
    from ratchet.trainer.rows.trajectory_export import Exported, trajectory_record

    return trajectory_record(Exported(found, store.trajectories.context_calls(found), verdict, None))


def _lines(found: Transcript, verdict: Verdict | None) -> Iterator[str]:
    from ratchet.output.terminal import format_time
    from ratchet.trainer.rows.trajectory_export import chat

    run = found.trajectory
    yield f"{run.id}  {run.alias}@{run.version}  {run.state}  opened {format_time(run.opened_at)}  {run.purpose}"
    for name, value in (("task", run.task), ("group", run.group_id), ("dropped", run.drop_reason)):
        if value:
            yield f"  {name:<8} {value}"
    if verdict is not None:
        yield f"  {'score':<8} {format_score(verdict)} by {verdict.judge}: {verdict.failure or verdict.explanation}"
    yield from (f"  {'call':<8} {_call(call)}" for call in found.calls)
    for message in found.messages:
        turn = chat(message)
        yield f"\n[{turn['role']}] {turn['content'] or ''}".rstrip()
        for called in turn["tool_calls"] or ():
            yield f"  -> {called['function']['name']}({called['function']['arguments']})"


def _call(call: Call) -> str:
    """Return a call in one line."""
    parts = [call.id, str(call.state), f"status {call.status}", call.dialect, f"linked by {call.linked_by}"]
    parts += [f"context {call.context}", f"{call.prompt_tokens} + {call.completion_tokens} tokens"]
    return ", ".join([*parts, *([f"untrainable: {call.untrainable}"] if call.untrainable else [])])
