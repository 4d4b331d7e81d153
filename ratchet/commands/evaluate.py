"""The group `ratchet eval`: measure without training anything; each kind of evaluation in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options
from ratchet.commands.eval_bfcl import bfcl
from ratchet.commands.eval_versions import versions
from ratchet.tuning.context import add_rollout_options

EVALUATIONS: tuple[click.Command, ...] = (bfcl,)


@click.group("eval", invoke_without_command=True)
@click.option("--model", metavar="NAME", help="What is measured: a version such as policy@4, or a model of model_list.")
@click.option("--against", metavar="NAME", help="What it is compared with.  [default: the live version]")
@click.option("--split", default="test", show_default=True, help="Split of the task set that is asked.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many tasks of the split.")
@click.option("--score-range", type=(float, float), metavar="LOW HIGH", help="What the judge can give.  [default: 0 1]")
@click.option("--resume", metavar="ID", help="Go on with a run that was stopped; what ended is not run again.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the comparison into this file.")
@add_rollout_options
@options.as_json
@click.pass_context
def evaluate(
    context: click.Context, /, model: str | None, against: str | None, png: Path | None, as_json: bool, **given: Any
) -> int:
    """Measure a model or a version on a task set, beside another: the same tasks for both, compared task by task.

    Nothing is trained. Ends with 0 where it is shown to be better, 3 where no difference is shown, 4 where it is shown
    to be worse, 1 on errors and where no rollout at all could be scored. The commands below measure on public
    benchmarks.

    \b
    Example:
      ratchet eval --model policy@4 --against policy@0 --tasks ./tasks --workflow agent:run
    """
    if context.invoked_subcommand is not None:
        return 0
    if model is None and given["resume"] is None:
        raise click.UsageError("say what is measured: --model policy@4, or one of the commands that --help shows")
    return versions(context, model, against, png, as_json, given)


for command in EVALUATIONS:
    evaluate.add_command(command)
