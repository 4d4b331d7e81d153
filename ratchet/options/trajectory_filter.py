"""Which trajectories a command is about: the options of one filter, the same wherever trajectories are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ratchet.options.time_types import Moment

_Command = TypeVar("_Command", bound=Callable[..., Any])

_STATES = ("open", "sealed", "grouped", "trained", "dropped")

_OPTIONS = (
    click.option("--state", type=click.Choice(_STATES), help="In this state."),
    click.option("--model", "alias", metavar="ALIAS", help="Of this alias."),
    click.option("--version", type=int, help="Of this policy version."),
    click.option("--task", help="Of this task."),
    click.option("--key", metavar="ID", help="Of this API key."),
    click.option("--tag", help="With this tag."),
    click.option("--since", type=Moment(), metavar="TIME", help="Opened then or later: 2026-11-21."),
    click.option("--until", type=Moment(), metavar="TIME", help="Opened before then."),
)


def filters(command: _Command) -> _Command:
    """Give a command the options of `store.listing.TrajectoryFilter`, by the names of its fields."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
