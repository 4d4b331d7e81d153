"""`ratchet tune select-model`: the same tasks for several models or versions, and the choice among them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.tuning.context import EXIT_NOT_BETTER, add_rollout_options, fail_unless_better

if TYPE_CHECKING:
    from ratchet.tuning.compare_models import Asked


@click.command("select-model")
@click.option(
    "--candidate", "candidates", multiple=True, metavar="NAME", help="A model of model_list, or alias@3; more."
)
@click.option("--split", default="test", show_default=True, help="Split of the task set that is asked.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many tasks of the split.")
@click.option(
    "--policy",
    type=click.Choice(["best", "cheapest"]),
    default="best",
    show_default=True,
    help="What is chosen: the best, or the cheapest --within X of it.",
)
@click.option("--within", type=click.FloatRange(0), help="For cheapest: how far below the best is good enough.")
@click.option("--score-range", type=(float, float), metavar="LOW HIGH", help="What the judge can give.  [default: 0 1]")
@click.option("--resume", metavar="ID", help="Go on with a run that was stopped; what ended is not run again.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the comparison into this file.")
@options.alias
@add_rollout_options
@fail_unless_better
@options.as_json
@click.pass_context
def select_model(context: click.Context, /, png: Path | None, as_json: bool, **given: Any) -> int:
    """Compare models or versions on the same tasks, and choose one: the best, or the cheapest within reach of it.

    Every candidate gets every task, and they take turns. A rollout that fails counts as a failure. The gain is told
    against the candidate that is named first. Ends with 0 when it came to its end, with 1 on errors and where no
    rollout at all could be scored; with --fail-unless-better, with 3 where nothing is chosen (a tie, too few tasks,
    attempts that could not be judged).

    \b
    Example:
      ratchet tune select-model --candidate policy@0 --candidate policy@3 --tasks ./tasks --workflow agent:run
    """
    from ratchet.tuning import compare_models, selection_report
    from ratchet.tuning import context as tuning

    fails: bool = given.pop("fail_unless_better")
    names = ("candidates", "split", "limit", "policy", "within", "score_range", "resume")
    asked = compare_models.Asked("select-model", **{name: given.pop(name) for name in names})
    _check(asked)
    _, found = compare_models.compare(tuning.settings_of(context, given), asked)
    if as_json:
        options.emit(selection_report.plain(found))
    else:
        selection_report.show(found)
        alias, at, version = (found.chosen or "").partition("@")
        if at:
            click.echo(f"it becomes live with: ratchet policies promote {alias} {version} --reason 'select-model'")
    if png is not None:
        selection_report.draw(found, png)
        click.echo(f"drawn: {png}", err=True)
    if not found.measured:
        return 1
    return EXIT_NOT_BETTER if fails and not found.chosen else 0


def _check(asked: Asked) -> None:
    """Refuse what cannot be meant. Raises UsageError."""
    if asked.resume is None and len(asked.candidates) < 2:
        raise click.UsageError("name at least two candidates: --candidate NAME --candidate NAME")
    if asked.resume is not None and asked.candidates:
        raise click.UsageError("--resume goes on with the candidates of that run: leave --candidate out")
    if (asked.policy == "cheapest") != (asked.within is not None):
        raise click.UsageError(
            "--policy cheapest and --within X belong together: how far below the best is good enough?"
        )
    if asked.score_range and asked.score_range[0] >= asked.score_range[1]:
        raise click.UsageError("--score-range LOW HIGH: LOW must be below HIGH")
