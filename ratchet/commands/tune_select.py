"""`ratchet tune select-model`: compare models or versions on the same tasks and choose one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options
from ratchet.commands.rollout_options import EXIT_NOT_BETTER, add_rollout_options, fail_unless_better, settings_of


@click.command("select-model")
@click.option(
    "--candidate", "candidates", multiple=True, metavar="NAME", help="A `model_list` name, or alias@3; repeat for more."
)
@click.option("--split", default="test", show_default=True, help="Split of the task set.")
@click.option("--limit", type=click.IntRange(1), help="Use only the first N tasks of the split.")
@click.option(
    "--policy",
    type=click.Choice(["best", "cheapest"]),
    default="best",
    show_default=True,
    help="Choose the best, or the cheapest --within X of it.",
)
@click.option("--within", type=click.FloatRange(0), help="With cheapest: accepted score difference to the best.")
@click.option(
    "--score-range", type=(float, float), metavar="LOW HIGH", help="Range of the judge's scores.  [default: 0 1]"
)
@click.option("--resume", metavar="ID", help="Resume a stopped run; finished rollouts are kept.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the comparison into this file.")
@options.alias
@add_rollout_options
@fail_unless_better
@options.as_json
@click.pass_context
def select_model(context: click.Context, /, png: Path | None, as_json: bool, **given: Any) -> int:
    """Compare models or versions on the same tasks and choose one: the best, or the cheapest within a margin of it.

    Every candidate gets every task, in alternating order. A failed rollout counts as a failure. The gain is measured
    against the first candidate. If nothing runs, the services that the candidates need are started and stopped again:
    only the proxy for models of `model_list`. Exits with 0 on completion, and with 1 on errors or if no rollout could
    be scored; with --fail-unless-better, with 3 if nothing is chosen (a tie, too few tasks, rollouts that could not be
    judged).

    \b
    Example:
      ratchet tune select-model --candidate policy@0 --candidate policy@3 --tasks ./tasks --workflow agent:run
      ratchet tune select-model --candidate gpt-small --candidate gpt-big --tasks ./tasks --workflow agent:run
    """
    from ratchet.tuning import compare_models, reports

    fails: bool = given.pop("fail_unless_better")
    names = ("candidates", "split", "limit", "policy", "within", "score_range", "resume")
    chosen_options = compare_models.ComparisonOptions("select-model", **{name: given.pop(name) for name in names})
    chosen_options.check()
    _, found = compare_models.compare(settings_of(context, given), chosen_options)
    if as_json:
        options.print_json(compare_models.plain(found))
    else:
        reports.show_selection(found)
        alias, at, version = (found.chosen or "").partition("@")
        if at:
            click.echo(f"make it live with: ratchet policies promote {alias} {version} --reason 'select-model'")
    if png is not None:
        reports.draw_selection(found, png)
        click.echo(f"drawn: {png}", err=True)
    if not found.measured:
        return 1
    return EXIT_NOT_BETTER if fails and not found.chosen else 0
