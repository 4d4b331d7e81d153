"""Advantage estimators by name: the built-in ones, and those that other packages register as entry points.

The built-in formulas are in `ratchet.trainer.controller.advantages`. Another package registers
AdvantageFunctions under a name of its own in the group `ratchet.advantage_estimators` (docs/plugins.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ratchet.trainer.errors import PluginError
from ratchet.trainer.user_code.plugins import ADVANTAGE_ESTIMATORS, load_plugin, plugin_names

BUILT_IN = ("grpo", "dr_grpo", "rloo", "reinforce++")
DEFAULT_ESTIMATOR = "dr_grpo"  # of trainer.advantage_estimator


@dataclass(frozen=True, slots=True)
class AdvantageFunctions:
    """An advantage estimator of another package.

    `group` maps the G scores of a group, of which some differ, to G advantages. Cohorts and ungrouped trajectories are
    estimated as by dr_grpo: relative to the mean of the other members, and of the family's earlier scores.
    """

    group: Callable[[Sequence[float]], Sequence[float]]


def why_unknown(name: str) -> str | None:
    """Return what is wrong with an estimator's name; None if there is one. Imports no plug-in."""
    plugins = plugin_names(ADVANTAGE_ESTIMATORS) if name not in BUILT_IN else []
    if name in BUILT_IN or name in plugins:
        return None
    installed = f", or a plug-in: {', '.join(plugins)}" if plugins else ""
    return f"{name!r} is no advantage estimator; use one of {', '.join(BUILT_IN)}{installed}"


def find_estimator(name: str) -> AdvantageFunctions | None:
    """Return a plug-in's estimator; None for a built-in one. Raises PluginError."""
    return None if name in BUILT_IN else _plugin(name)


@cache
def _plugin(name: str) -> AdvantageFunctions:
    found = load_plugin(ADVANTAGE_ESTIMATORS, name)
    if not isinstance(found, AdvantageFunctions):
        raise PluginError(
            f"advantage estimator {name!r} is a {type(found).__name__}: it must be AdvantageFunctions of "
            "ratchet.trainer.settings.estimators (docs/plugins.md)"
        )
    return found
