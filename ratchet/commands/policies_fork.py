"""`ratchet policies fork`: copy a version of one agent into another agent, as its candidate."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from ratchet import options

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.trainer.adapters.adapter_store import AdapterStore
    from ratchet.trainer.release.candidates import ForkTarget

_NAMED = re.compile(r"(?P<alias>[^@/\s]+)@(?P<version>\d+)")


@click.command()
@click.argument("source", metavar="NAME@VERSION")
@click.argument("target", metavar="AGENT")
@options.store_url
@options.project
@click.pass_context
def fork(context: click.Context, source: str, target: str, store: str | None, project: str | None) -> None:
    """Copy a version (adapter and optimizer state) into another agent as its candidate.

    The agent's trainer proves and releases it like any candidate, with the agent's own prompt, and trains on from it.
    The agent must have no undecided version. If the optimizer state was pruned, training starts with a new optimizer.

    \b
    Example:
      ratchet policies fork mail@7 support
    """
    named = _NAMED.fullmatch(source)
    if named is None:
        raise click.UsageError(f"{source!r} is not a version: give NAME@VERSION, such as mail@7")
    from ratchet.trainer.release.candidates import fork as copy_version

    settings = options.read_project_settings(context, {"store": store, "project": project})
    adapters, fork_target = target_of(settings, target)
    with options.open_store_for_command(settings.store_url) as opened:
        options.check_alias(opened, named["alias"])
        options.check_alias(opened, target)
        policy = opened.policies.get(named["alias"], int(named["version"]))
        made = copy_version(opened, adapters, policy, fork_target, by=options.current_user())
    click.echo(f"{target}@{made.candidate.version} is a candidate: a copy of {source}")
    if not made.with_state:
        click.echo(
            f"{source} has no learner's state any more (trainer.keep_optimizer_states): the optimizer of {target} "
            "starts over"
        )


def target_of(settings: Settings, agent: str) -> tuple[AdapterStore, ForkTarget]:
    """Return the adapter store, and where the agent's versions are and how they are trained."""
    from ratchet.settings.project_settings import parse_learner
    from ratchet.trainer.adapters.adapter_store import AdapterStore
    from ratchet.trainer.release.candidates import ForkTarget

    learner, _ = parse_learner(settings.for_agent(agent).learner, {})
    place = settings.adapters.store
    versions = f"{place}/{agent}/checkpoints" if place else str(settings.state.checkpoints(agent))
    return AdapterStore(settings.state.adapter_cache, settings.adapters.max_cache_bytes), ForkTarget(
        agent, versions, learner
    )
