"""`ratchet reload`: the agents of a changed ratchet.yaml join and leave a project that is up.

The services watch the resolved settings (`settings/agents_watch.py`). Everything is checked before they are written:
settings, judges, and the base model that the agents' versions belong to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.errors import CliError
from ratchet.settings.agents_watch import changed_agents, with_agents_of
from ratchet.settings.load_settings import load
from ratchet.settings.masking import MASK
from ratchet.settings.project_settings import OTHER_VARIABLES, PREFIX, Settings
from ratchet.supervisor import base_model_check, preflight_checks, services
from ratchet.supervisor.up import read_run_state


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did: agents that joined, left and changed, and the keys that wait for a restart."""

    joined: tuple[str, ...]
    left: tuple[str, ...]
    changed: tuple[str, ...]
    need_restart: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        parts = [("joined", self.joined), ("left", self.left), ("changed", self.changed)]
        found = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        text = [f"agents: {found}; proxy and trainer follow within seconds" if found else "agents: none changed"]
        if self.need_restart:
            text.append(f"not applied before a restart (`ratchet down`, `ratchet up`): {', '.join(self.need_restart)}")
        return text


def reload_agents(new: Settings, note: Callable[[str], None]) -> Reloaded:
    """Let the agents of `new` join and leave the project that is up.

    Raises CliError if the project is not up, and SettingsError if the agents cannot be used;
    nothing has changed then.
    """
    state = new.state
    if not (run := read_run_state(state)).get("ready"):
        raise CliError(f"project {new.project} is not up: `ratchet up` starts it with the settings as they are")
    if not new.agents and not new.is_set("model"):
        raise CliError("no agents are set: name them under `agents` in ratchet.yaml, or the one agent by `model`")
    running = load(state.resolved, environ=_without_settings(os.environ))
    after = with_agents_of(running, new)
    joined, left, changed = changed_agents(running, after)
    need_restart = _not_applied(new, running)
    if affected := [name for name in (*joined, *changed) if after.agents_by_name[name].has_judge]:
        _check_judges(after, affected)
        if "trainer" not in run["services"]:
            need_restart.append("the trainer's process, which no agent needed when the project was started")
    _register(after, joined, next(iter(running.agents_by_name)), new.store_url, note)
    services.write_resolved_settings(after, state.resolved)
    return Reloaded(tuple(joined), tuple(left), tuple(changed), tuple(need_restart))


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings: the file holds those that the project runs with."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in OTHER_VARIABLES}


def _check_judges(settings: Settings, names: list[str]) -> None:
    """Raise SettingsError if the trainer could not create the judge of one of these agents."""
    if settings.agents:
        settings = settings.changed(agents={name: settings.given_in("agents")[name] for name in names})
    preflight_checks.check_judges(settings, services.service_environment(settings))


def _register(settings: Settings, joined: list[str], known: str, store_url: str, note: Callable[[str], None]) -> None:
    """Register version 0 of the agents that join: the base model, as the `known` agent's. Raises CliError."""
    from ratchet.store.records import BASE_VERSION
    from ratchet.store.store import open_store

    store = open_store(store_url, create=False)
    try:
        served_name = store.policies.get(known, BASE_VERSION).served_name
        for name in joined:
            store.policies.register_base(name, served_name)
        base_model_check.check_base_model(settings, store, note, serves=True)
    finally:
        store.close()


def _not_applied(new: Settings, running: Settings) -> list[str]:
    """Return the keys that the user set otherwise than the project runs with. `up` chose those that are not set."""
    differ = []
    for path, source in new._sources.items():
        if path[0] in ("agents", "model") or source.startswith("-"):
            continue
        have, want = _at(running.given, path), _at(new.given, path)
        if have != want and MASK not in str(have):
            differ.append(".".join(path))
    return sorted(differ)


def _at(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content
