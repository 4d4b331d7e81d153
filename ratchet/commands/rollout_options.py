"""Options of the commands that run rollouts: `ratchet tune`, `ratchet eval` and `ratchet doctor --workflow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet import options

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings

EXIT_NOT_BETTER = 3  # exit code without a better result, with --fail-unless-better
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    options.tasks,
    options.test_size,
    options.workflow,
    options.judge,
    options.attempts,
    options.concurrency,
    options.seed,
    options.proxy_url,
    options.store_url,
    options.project,
)

fail_unless_better = click.option(
    "--fail-unless-better",
    is_flag=True,
    help=f"Exit with {EXIT_NOT_BETTER} unless something is shown to be better.",
)


def add_rollout_options(command: _Command) -> _Command:
    """Add the options of commands that run rollouts."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settings_of(context: click.Context, given: dict[str, Any]) -> Settings:
    """Return the settings of the project's agent, overridden by the options of `add_rollout_options`."""
    from ratchet.tuning.context import setting_names

    return options.read_agent_settings(context, setting_names(given))
