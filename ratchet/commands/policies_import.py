"""`ratchet policies import`: an adapter that was trained elsewhere, as a candidate of an agent."""

from __future__ import annotations

from pathlib import Path

import click

from ratchet import options
from ratchet.commands.policies_fork import target_of


@click.command("import")
@click.argument("adapter", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.argument("agent", metavar="AGENT")
@options.store_url
@options.project
@click.pass_context
def import_(context: click.Context, adapter: Path, agent: str, store: str | None, project: str | None) -> None:
    """Copy a PEFT adapter that was trained elsewhere into an agent as its candidate.

    The agent's trainer proves, checks and releases it like any candidate, and trains on from it with a new optimizer.
    It must be plain LoRA with the learner's lora_r, lora_alpha and layers. The agent must have no undecided version.

    \b
    Example:
      ratchet policies import ./mail-lora mail
    """
    from ratchet.trainer.release.candidates import import_adapter

    settings = options.read_project_settings(context, {"store": store, "project": project})
    adapters, target = target_of(settings, agent)
    with options.open_store_for_command(settings.store_url) as opened:
        options.check_alias(opened, agent)
        made = import_adapter(opened, adapters, adapter, target, by=options.current_user())
    click.echo(f"{agent}@{made.version} is a candidate: a copy of {adapter}")
