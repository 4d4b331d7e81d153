"""The group `ratchet eval`: measure without training anything; each kind of evaluation in a file of its own."""

from __future__ import annotations

import click

from ratchet.commands.eval_bfcl import bfcl

EVALUATIONS: tuple[click.Command, ...] = (bfcl,)


@click.group("eval")
def evaluate() -> None:
    """Measure a model or a version on tasks; nothing is trained.

    \b
    Example:
      ratchet eval --help
    """


for command in EVALUATIONS:
    evaluate.add_command(command)
