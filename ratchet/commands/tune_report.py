"""`ratchet tune report` and `ratchet tune runs`: compare the results of tuning runs, and list the runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratchet import options
from ratchet.output import format_time, strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.operation_records import Tuning

_MAX_RUNS = 1000  # newest runs that are read
KINDS = ("select-model", "prompt", "weights", "eval", "lessons", "doctor")


@click.command()
@click.option("--model", metavar="NAME", help="Only runs for this agent.  [default: that of the newest run]")
@click.option(
    "--tasks", metavar="SOURCE", help="Only runs on this task set, by its source.  [default: the newest run's]"
)
@click.option(
    "--judged-by", metavar="JUDGE", help="Only runs with this judge, by its name.  [default: the newest run's]"
)
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the gains into this file.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@options.as_json
@options.store_url
@options.project
@click.pass_context
def report(
    context: click.Context,
    /,
    model: str | None,
    tasks: str | None,
    judged_by: str | None,
    png: Path | None,
    markdown: bool,
    as_json: bool,
    store: str | None,
    project: str | None,
) -> int:
    """Show what each method gained on the same held-out tasks, with an interval, and what it cost.

    It compares the newest finished run of each method. Runs with other tasks, another judge or another alias are listed
    with the reason why they are not compared. Exits with 1 if no run has finished.

    \b
    Example:
      ratchet tune report --png gains.png
    """
    import msgspec

    from ratchet.trainer.errors import TuningError
    from ratchet.tuner.reports.report import missing
    from ratchet.tuner.reports.report import report as made
    from ratchet.tuning import reports

    with options.open_project_store(context, store=store, project=project) as opened:
        live, newest = opened.policies.live(), opened.tunings.page(limit=_MAX_RUNS)
    if reason := missing(newest, model, tasks, judged_by):
        raise TuningError(reason)
    found = made(newest, live=live, alias=model, tasks=tasks, judge=judged_by)
    if as_json:
        options.print_json(msgspec.to_builtins(found))
    elif markdown:
        click.echo(reports.markdown(found), nl=False)
    else:
        reports.show_report(found)
    if png is not None:
        reports.draw_report(found, png)
        click.echo(f"drawn: {png}", err=True)
    return 0 if found.task_set is not None else 1


@click.command()
@click.option("--method", type=click.Choice(KINDS), help="Only runs of this method.")
@click.option(
    "--limit", type=click.IntRange(1, _MAX_RUNS), default=20, show_default=True, help="Maximum number of runs."
)
@options.as_json
@options.store_url
@options.project
@click.pass_context
def runs(
    context: click.Context, method: str | None, limit: int, as_json: bool, store: str | None, project: str | None
) -> None:
    """List the runs of the tuner, newest first: id, method, state, alias, start and duration.

    Rollouts of `ratchet doctor --workflow` are listed only with --method doctor.

    \b
    Example:
      ratchet tune runs --method prompt
    """
    import msgspec

    from ratchet.tuning.run_lease import interruption

    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.tunings.page(kind=method, limit=limit)
        led = opened.tunings.led()
    interrupted = {one.id: interruption(one, led) for one in found}
    if as_json:
        options.print_json([msgspec.to_builtins(one) | {"interrupted": interrupted[one.id]} for one in found])
        return
    for one in found:
        click.echo(strip_control_characters(_run_line(one, interrupted[one.id])))
    if not found:
        click.echo("no runs yet: `ratchet tune --help` lists the methods")


def _run_line(tuning: Tuning, interrupted: str | None) -> str:
    """Return a line of the list of runs."""
    from ratchet.tuning.reports import duration

    elapsed = duration(tuning.ended_at - tuning.started_at) if tuning.ended_at else interrupted or "running"
    line = (
        f"{tuning.id}  {tuning.kind:<12} {tuning.state:<7} {tuning.alias}  {format_time(tuning.started_at)}  {elapsed}"
    )
    return f"{line}  {tuning.error}" if tuning.error else line
