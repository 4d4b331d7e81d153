"""The group `ratchet tune`: three methods on one task set, with one judge and one report; each in a file of its own."""

from __future__ import annotations

import click

from ratchet.commands import tune_lessons, tune_prompt, tune_report, tune_select, tune_weights


@click.group()
def tune() -> None:
    """Tune an agent on a task set: choose its model, its prompt or its weights, and see what each gained.

    \b
    Example:
      ratchet tune select-model --candidate policy@0 --candidate policy@3 --tasks ./tasks --workflow agent:run
    """


for command in (
    tune_select.select_model,
    tune_prompt.prompt,
    tune_prompt.promote_,
    tune_weights.weights,
    tune_lessons.lessons,
    tune_report.report,
    tune_report.runs,
):
    tune.add_command(command)
