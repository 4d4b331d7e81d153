"""`ratchet tune weights`: reinforcement learning on a task set, with an optional SFT warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options
from ratchet.commands.rollout_options import EXIT_NOT_BETTER
from ratchet.commands.rollout_options import fail_unless_better as fail_unless_better_

_OWN = (
    "families", "rounds", "tasks_per_round", "eval_every", "eval_tasks", "validation_tasks", "eval_attempts",
    "eval_workflow", "family_workflow", "patience", "collect", "warm_start", "warm_start_setting", "resume",
)  # fmt: skip


@click.command()
@click.option(
    "--tasks",
    "families",
    multiple=True,
    metavar="[NAME=]SOURCE[:WEIGHT]",
    help="Task set. May be repeated: sets are trained together.",
)
@click.option("--rounds", type=click.IntRange(min=0), help="Rounds of training tasks.  [default: 20]")
@click.option("--tasks-per-round", type=click.IntRange(min=1), help="Training tasks of a round.  [default: 16]")
@click.option("--eval-every", type=click.IntRange(min=1), help="Rounds between two validations.  [default: 5]")
@click.option("--eval-tasks", type=click.IntRange(min=2), help="Test tasks of each set.  [default: all]")
@click.option("--validation-tasks", type=click.IntRange(min=1), help="Validation tasks of each set.  [default: 32]")
@click.option(
    "--eval-attempts", type=click.IntRange(min=1), help="Rollouts per validation and test task.  [default: 1]"
)
@click.option(
    "--family-workflow",
    multiple=True,
    metavar="NAME=SPEC",
    help="Agent of the task set with this name, in place of --workflow. May be repeated.",
)
@click.option("--eval-workflow", metavar="SPEC", help="Agent of the evaluations, such as a greedy one.")
@click.option(
    "--patience", type=click.IntRange(min=0), help="Stop after this many validations without a gain.  [default: 3]"
)
@click.option(
    "--collect", type=click.IntRange(min=0), help="Rounds of rollouts for a warm start, not trained.  [default: 0]"
)
@click.option(
    "--warm-start",
    multiple=True,
    metavar="SOURCE",
    help="Run SFT first on: policy, demonstrations, or a `model_list` name. May be repeated.",
)
@click.option(
    "--warm-start-setting",
    multiple=True,
    metavar="KEY=VALUE",
    help="A warm-start setting, such as general=chat.jsonl. May be repeated.",
)
@click.option("--resume", metavar="ID", help="Resume a run that was stopped or killed.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the learning curve into this file.")
@options.test_size
@options.workflow
@options.judge
@options.attempts
@options.concurrency
@options.seed
@options.alias
@options.base_model
@options.store_url
@options.project
@fail_unless_better_
@options.as_json
@click.pass_context
def weights(context: click.Context, /, png: Path | None, as_json: bool, fail_unless_better: bool, **given: Any) -> int:
    """Train the weights on a task set, check versions on validation tasks, and measure the gain on the test split.

    The rollouts go through the running project (`ratchet up`), whose trainer learns from them as from any traffic. If
    no project is running, vLLM, proxy and trainer are started and stopped again. Exits with 0 on completion and 1 on
    errors; with --fail-unless-better, with 3 unless the version served afterwards is shown to be better than before.

    \b
    Example:
      ratchet tune weights --tasks ./tasks --workflow my_agent:run --rounds 20
      ratchet tune weights --tasks mail=./mail:3 --tasks math=./math --warm-start policy --collect 4
      ratchet tune weights --tasks mail=./mail --tasks math=./math --workflow mail:run --family-workflow math=sums:run
    """
    from ratchet.output import print_note
    from ratchet.supervisor.up import attach_or_start
    from ratchet.tuner.reports.tuning_result import plain
    from ratchet.tuning import reports, tune_weights

    own = {name: given.pop(name) for name in _OWN}
    settings = tune_weights.prepare(options.read_agent_settings(context, tune_weights.setting_names(given)), own)
    with attach_or_start(settings, print_note if as_json else click.echo) as services:
        result = tune_weights.tune(settings, own, services)
    if as_json:
        options.print_json(plain(result))
    else:
        reports.show_weights(result)
    if png is not None:
        reports.draw_weights(result, png)
        click.echo(f"drawn: {png}", err=True)
    return EXIT_NOT_BETTER if fail_unless_better and result.best is None else 0
