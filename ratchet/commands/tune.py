"""The group `ratchet tune`: three methods on one task set, with one judge and one report; each in a file of its own."""

from __future__ import annotations

import click

from ratchet.commands import tune_report


@click.group()
def tune() -> None:
    """Tune an agent on a task set: choose its model, its prompt or its weights, and see what each gained.

    \b
    Example:
      ratchet tune report
    """


for command in (tune_report.report, tune_report.runs):
    tune.add_command(command)
