"""The section `agents`: the keys of an agent's entry, and how an entry and the shared sections make its settings.

An entry takes every key of `trainer` that one agent can have for itself, the keys of `learner` that not all agents
share, and `share`. Keys that belong to a process or to all agents are refused with the place where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ratchet.errors import SettingsError
from ratchet.proxy.agent_names import check_agent_names, nearest_name
from ratchet.settings.learner_section import agent_learner_keys, learner_keys
from ratchet.settings.setting_errors import Refused, key_tree, listed
from ratchet.trainer.settings.trainer_settings import TrainerSettings

Entries = Mapping[str, Mapping[str, Any]]

# Keys of `trainer` that the one controller has, not each agent.
CONTROLLER_KEYS = frozenset(
    {"lease_seconds", "poll_interval_seconds", "metrics_port", "metrics_host", "log_format", "log_level", "report_to"}
)
_AGENT_ONLY = frozenset({"share"})  # an entry has them, the section `trainer` has not
_OF_THE_PROJECT = ("base_model", "store", "vllm", "proxy", "tuner", "model_list", "project", "state_dir")


def trainer_keys(derived: frozenset[str]) -> dict[str, Any]:
    """Return the keys of the section `trainer`; `derived` are those that no user sets."""
    return {key: kind for key, kind in key_tree(TrainerSettings).items() if key not in derived | _AGENT_ONLY}


def agent_keys(derived: frozenset[str]) -> dict[str, Any]:
    """Return the keys of an agent's entry; `derived` are those that no user sets."""
    keys = {key: kind for key, kind in key_tree(TrainerSettings).items() if key not in derived}
    for key in CONTROLLER_KEYS & keys.keys():
        keys[key] = Refused(f"belongs to the trainer's process, which all agents share: set trainer.{key}")
    for key in _OF_THE_PROJECT:
        keys[key] = Refused(f"is shared by all agents: set {key} at the top level")
    own = agent_learner_keys()
    shared = {key: Refused(f"is shared by all agents of the learner: set learner.{key}") for key in learner_keys()}
    return {**keys, "learner": shared | own}


def check_entries(agents: Entries) -> None:
    """Raise ValueError unless these can be the names of agents: no two may differ by case only."""
    check_agent_names(tuple(agents))
    for name in agents:
        if name in (".", ".."):
            raise ValueError(f"agent {name!r}: its files are in a folder of its name; choose another name")


def entry_of(agents: Entries, name: str) -> Mapping[str, Any]:
    """Return an agent's entry. Raises SettingsError that names the nearest agent."""
    if name not in agents:
        nearest = nearest_name(name, tuple(agents))
        hint = f"did you mean {nearest}?" if nearest else f"the agents are {listed(agents)}"
        raise SettingsError(f"there is no agent {name!r}; {hint}")
    return agents[name]


def merged_section(shared: Mapping[str, Any], own: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with an agent's values in place of the shared ones; inner sections are merged too."""
    merged = dict(shared)
    for key, value in own.items():
        inner, before = known.get(key), merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = merged_section(before, value, inner)
        else:
            merged[key] = dict(value) if isinstance(value, MappingProxyType) else value
    return merged
