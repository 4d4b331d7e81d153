"""The group `ratchet tune`: three methods on one task set, with one judge and one report."""

from __future__ import annotations

import click

from ratchet.commands import tune_prompt, tune_report, tune_select, tune_weights
from ratchet.commands.plugin_group import PluginGroup


@click.group(cls=PluginGroup, plugins="ratchet.tune_commands")
def tune() -> None:
    """Tune the model, the prompt or the weights of an agent on a task set, and compare the gains.

    \b
    Example:
      ratchet tune select-model --candidate policy@0 --candidate policy@3 --tasks ./tasks --workflow agent:run
    """


for command in (
    tune_select.select_model,
    tune_prompt.prompt,
    tune_prompt.promote_,
    tune_weights.weights,
    tune_report.report,
    tune_report.runs,
):
    tune.add_command(command)
