"""`ratchet tune report` and `ratchet tune runs`: what the tuner's runs found, side by side, and which there were."""

from __future__ import annotations

from pathlib import Path

import click

from ratchet import options
from ratchet.output.tables import strip_control_characters

_MOST = 1000  # newest runs that are read
KINDS = ("select-model", "prompt", "weights", "eval", "lessons", "doctor")


@click.command()
@click.option("--model", metavar="ALIAS", help="Only runs for this alias.  [default: that of the newest run]")
@click.option("--tasks", metavar="SOURCE", help="Only runs on this task set, as it was named.  [default: the newest's]")
@click.option("--judged-by", metavar="JUDGE", help="Only runs with this judge, by its name.  [default: the newest's]")
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

    The newest finished run of each method stands in it. Runs of other tasks, another judge or another alias are not
    mixed in: they are named with the reason. Ends with 1 where no run has finished.

    \b
    Example:
      ratchet tune report --png gains.png
    """
    from ratchet.trainer.errors import TuningError
    from ratchet.tuner.reports.report import missing
    from ratchet.tuner.reports.report import report as made
    from ratchet.tuning import tuning_report

    with options.open_project_store(context, store=store, project=project) as opened:
        live, newest = opened.policies.live(), opened.tunings.page(limit=_MOST)
    if told := missing(newest, model, tasks, judged_by):
        raise TuningError(told)
    found = made(newest, live=live, alias=model, tasks=tasks, judge=judged_by)
    if as_json:
        options.emit(tuning_report.plain(found))
    elif markdown:
        click.echo(tuning_report.markdown(found), nl=False)
    else:
        tuning_report.show(found)
    if png is not None:
        tuning_report.draw(found, png)
        click.echo(f"drawn: {png}", err=True)
    return 0 if found.task_set is not None else 1


@click.command()
@click.option("--method", type=click.Choice(KINDS), help="Only runs of this method.")
@click.option("--limit", type=click.IntRange(1, _MOST), default=20, show_default=True, help="How many, newest first.")
@options.as_json
@options.store_url
@options.project
@click.pass_context
def runs(
    context: click.Context, method: str | None, limit: int, as_json: bool, store: str | None, project: str | None
) -> None:
    """List the runs of the tuner, newest first: id, method, state, alias, when, how long.

    What `ratchet doctor --workflow` tried is listed with --method doctor alone.

    \b
    Example:
      ratchet tune runs --method prompt
    """
    import msgspec

    from ratchet.tuning import tuning_report
    from ratchet.tuning.run_lease import LEASES

    with options.open_project_store(context, store=store, project=project) as opened:
        found = opened.tunings.page(kind=method, limit=limit)
        held = {one.name.removeprefix(LEASES) for one in opened.leases.held(LEASES)}
    if as_json:
        options.emit([msgspec.to_builtins(one) for one in found])
        return
    for one in found:
        click.echo(strip_control_characters(tuning_report.run_line(one, at_work=one.id in held)))
    if not found:
        click.echo("no runs yet: `ratchet tune --help` shows the methods")
