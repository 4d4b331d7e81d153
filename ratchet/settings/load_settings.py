"""Load the settings of a project: `ratchet.yaml`, then RATCHET_* variables, then command-line options. Later wins.

A key that is not known is refused with the nearest known one. Where each value came from is recorded, so that an error
can name it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import typing
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any

import yaml

from ratchet.errors import SettingsError
from ratchet.settings.masking import MASK, mask_store_url
from ratchet.settings.project_settings import OTHER_VARIABLES, PREFIX, SHARED_KEYS, Settings
from ratchet.settings.setting_errors import (
    ANY_NAME,
    Refused,
    is_option,
    key_tree,
    listed,
    nearest_variable,
    type_of_key,
)
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings

CONFIG_FILE = "ratchet.yaml"
# Kubernetes sets such variables in every container of a namespace with a service named ratchet: RATCHET_PORT=tcp://...
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_FROM_LAST_RUN = ("model", "base_model", "store")
AGENTS = ("agents",)

Options = Mapping[tuple[str, ...], tuple[str, Any]]  # key path -> (name of the option, value); None: not given


# Keys of `trainer` that the one controller has, not each agent; keys that only an agent's entry has.
CONTROLLER_KEYS = frozenset(
    {"lease_seconds", "poll_interval_seconds", "metrics_port", "metrics_host", "log_format", "log_level", "report_to"}
)
_AGENT_ONLY = frozenset({"share"})
_OF_THE_PROJECT = ("base_model", "store", "vllm", "proxy", "tuner", "model_list", "project", "state_dir")


@cache
def known_keys() -> dict[str, Any]:
    """Return the tree of settings: a key's type, or a mapping for a section."""
    keys = key_tree(Settings)
    trainer = keys["trainer"]
    keys["trainer"] = {key: kind for key, kind in trainer.items() if key not in _AGENT_ONLY}
    keys["learner"] = key_tree(LearnerSettings) | key_tree(LearnerProcessSettings)
    keys["agents"] = {ANY_NAME: _agent_keys(trainer, keys["learner"])}
    keys["tuner"]["lessons"] = {ANY_NAME: Any}  # the plug-in knows its keys
    return keys


def _agent_keys(trainer: Mapping[str, Any], learner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an agent's entry; those of a process or of all agents are refused."""
    process = "belongs to the trainer's process, which all agents share: set trainer."
    shared = "is shared by all agents of the learner: set learner."
    return {
        **{key: Refused(f"{process}{key}") if key in CONTROLLER_KEYS else kind for key, kind in trainer.items()},
        **{key: Refused(f"is shared by all agents: set {key} at the top level") for key in _OF_THE_PROJECT},
        "learner": {key: Refused(f"{shared}{key}") if key in SHARED_KEYS else one for key, one in learner.items()},
    }


def load(
    config: Path | None = None,
    options: Options | None = None,
    environ: Mapping[str, str] = os.environ,
    content: Mapping[str, Any] = MappingProxyType({}),
) -> Settings:
    """Load and check the settings of the project in the current folder.

    config   a settings file; None reads `ratchet.yaml` if it exists
    options  command-line options by key path; a value of None is not set
    content  settings of a Python call, in the form of the file; stronger than file and variables

    With `agents`, the option --model chooses one of them: the settings are those of this agent alone.

    Raises SettingsError.
    """
    if config is None and Path(CONFIG_FILE).is_file():
        config = Path(CONFIG_FILE)
    layers = _Layers()
    if config is not None:
        layers.add(_read_file(config), (), str(config))
    layers.add_variables(environ)
    layers.add(content, (), "settings=")
    for path, (name, value) in (options or {}).items():
        if value is not None:
            layers.put(path, value, name)
    chosen = layers.choose_agent()
    if agents := layers.values.get("agents"):
        layers.values["agents"] = _below_options(agents, layers.sources)
    settings = Settings.of(layers.values, layers.sources, environ)
    return settings if chosen is None else settings.for_agent(chosen)


def _below_options(
    agents: Mapping[str, Mapping[str, Any]], sources: Mapping[tuple[str, ...], str]
) -> dict[str, dict[str, Any]]:
    """Return the agents' entries without the keys that an option sets: --judge is stronger than an entry's judge."""
    by_option = {path[1] for path, source in sources.items() if path[0] == "trainer" and is_option(source)}
    return {name: {key: entry[key] for key in entry if key not in by_option} for name, entry in agents.items()}


def load_agent(
    config: Path | None = None, options: Options | None = None, content: Mapping[str, Any] = MappingProxyType({})
) -> Settings:
    """Load the settings of one agent, with what its project's current or last run has: the only one, or `model`.

    Raises SettingsError.
    """
    given = {".".join(path) for path, (_, value) in (options or {}).items() if value is not None}
    return one_agent(with_last_run(load(config, options, content=content), given | set(content)))


def one_agent(settings: Settings) -> Settings:
    """Return the settings of the project's only agent. Raises SettingsError that lists several."""
    names = list(settings.agents_by_name)
    if len(names) > 1:
        raise SettingsError(
            f"project {settings.project} has {len(names)} agents: choose one with --model NAME (in Python "
            f"agent=NAME): {listed(names)}"
        )
    return settings.for_agent(names[0])


def with_last_run(settings: Settings, given: Collection[str] = ()) -> Settings:
    """Return the settings with agents, base model, store and judge of the project's current or last run.

    Keys in `given` keep their value; a `model` in it chooses an agent of the run. The judge is taken only if the
    settings name none. Raises SettingsError if the run has no such agent, or if its store URL has a password, which is
    not saved, and `settings` name another store.
    """
    run = read_last_run(settings)
    agents: dict[str, Any] = run.get("agents") or {}
    found = {key: value for key, value in run.items() if key in _FROM_LAST_RUN and key not in given}
    if not settings._is_chosen and (agents or "model" in found):
        own = settings.given_in("agents")
        weaker = _below_options(agents, settings._sources)
        found["agents"] = {name: own.get(name, entry) for name, entry in weaker.items()}
        found["proxy"] = settings.proxy_values_of(agents or (found["model"],))
    judge = agents.get(settings.model, {}).get("judge") or (run.get("trainer") or {}).get("judge")
    if judge and not settings.has_judge:
        found["trainer"] = {"judge": judge}
    store = found.get("store")
    if isinstance(store, str) and MASK in store:
        if settings.store is None or mask_store_url(settings.store) != store:
            raise SettingsError(
                f"store: project {settings.project} uses {store}, and its password is never saved: set RATCHET_STORE "
                "or give --store"
            )
        del found["store"]
    merged = settings.changed(**found)
    return merged.for_agent(settings.model) if merged.agents and "model" in given else merged


def read_last_run(settings: Settings) -> dict[str, Any]:
    """Return the resolved settings that `up` wrote, which hold no secret; empty if the project never ran."""
    try:
        content = json.loads(settings.state.resolved.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class _Layers:
    """The merged values, the known keys, and where each value came from. The weakest layer is added first."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[tuple[str, ...], str] = {}
        self._known = known_keys()

    def add(self, content: Mapping[Any, Any], path: tuple[str, ...], source: str) -> None:
        """Add the keys of a section. Raises SettingsError for an unknown one."""
        for key, value in content.items():
            here = (*path, str(key))
            if not isinstance(type_of_key(here, self._known, source), Mapping):
                self.put(here, value, source)
                continue
            if value is not None and not isinstance(value, Mapping):
                raise SettingsError(f"{source}: {'.'.join(here)} is a section; put its keys under it, indented")
            if path == AGENTS:  # an agent without keys of its own is an agent
                self.values.setdefault(AGENTS[0], {}).setdefault(here[-1], {})
                self.sources[here] = source
            self.add(value or {}, here, source)

    def put(self, path: tuple[str, ...], value: Any, source: str) -> None:
        """Set one value."""
        section = self.values
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
        self.sources[path] = source

    def add_variables(self, environ: Mapping[str, str]) -> None:
        """Add the RATCHET_* variables: `RATCHET_PROXY__PORT` sets `proxy.port`. Secrets are not settings.

        RATCHET_AGENTS holds agents with their keys as YAML. RATCHET_AGENTS__MAIL_BOT__JUDGE sets a key of the agent
        mail-bot or Mail.bot that the file or RATCHET_AGENTS has: a variable cannot hold every name, so it adds none.
        """
        for name, text in setting_variables(environ).items():  # RATCHET_AGENTS comes before those of one agent
            path, source = tuple(name.removeprefix(PREFIX).lower().split("__")), f"variable {name}"
            if path == AGENTS:
                content = _parse(dict, text, name)
                if not isinstance(content, Mapping):
                    raise SettingsError(f"{source}: must hold agents with their keys, such as {{mail: {{judge: a:b}}}}")
                self.add(content, AGENTS, source)
                continue
            if path[:1] == AGENTS:
                path = (*AGENTS, self._agent_named(path[1], source), *path[2:])
            self.put(path, _parse(self._type_of(name, path), text, name), source)

    def _agent_named(self, part: str, source: str) -> str:
        """Return the agent that a part of a variable's name means. Raises SettingsError unless it is exactly one."""
        agents: list[str] = sorted(self.values.get(AGENTS[0], {}))
        meant = [agent for agent in agents if re.sub(r"[^a-z0-9]", "_", agent.lower()) == part]
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise SettingsError(f"{source}: {' and '.join(meant)} have this name; set the key in the file")
        known = f"the agents are {', '.join(agents)}" if agents else "no agents are set"
        raise SettingsError(
            f"{source}: there is no agent {part!r}, and a variable adds none; {known}; set `agents` in the file or "
            f"{PREFIX}AGENTS"
        )

    def _type_of(self, name: str, path: tuple[str, ...]) -> Any:
        """Return the type of the key that a variable names. Raises SettingsError with the nearest variable."""
        try:
            kind = type_of_key(path, self._known, f"variable {name}")
        except SettingsError as error:
            if similar := difflib.get_close_matches(name, OTHER_VARIABLES, n=1, cutoff=0.9):
                raise SettingsError(f"variable {name} is not known; did you mean {similar[0]}?") from error
            raise SettingsError(f"{error}{nearest_variable(name, PREFIX, self._known)}") from error
        if isinstance(kind, Mapping):
            key = "__".join((*path, next(iter(kind)))).upper()
            raise SettingsError(f"variable {name}: names a section; name a key, such as {PREFIX}{key}")
        return kind

    def choose_agent(self) -> str | None:
        """Return the agent that the option --model names, and take the option out of the values.

        Raises SettingsError if a file or a variable sets both `model` and `agents`.
        """
        if not self.values.get("agents") or "model" not in self.values:
            return None
        source = self.sources.pop(("model",))
        if is_option(source):
            return str(self.values.pop("model"))
        raise SettingsError(
            f"{source}: model and agents exclude each other: `model` is the one agent of a project without `agents`; "
            "remove one of the two"
        )


def _read_file(file: Path) -> dict[Any, Any]:
    try:
        with file.open(encoding="utf-8") as stream:  # of a stream, YAML's errors quote no line: it may hold a secret
            content = (json.load(stream) if file.suffix == ".json" else yaml.safe_load(stream)) or {}
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{file}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: must hold keys and values, such as `project: demo`")
    return content


def setting_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the RATCHET_* variables that are settings, by name."""
    ours = {name: environ[name] for name in sorted(environ) if name.startswith(PREFIX) and name not in OTHER_VARIABLES}
    return {name: value for name, value in ours.items() if not _is_service_link(name, value)}


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)


def _parse(kind: Any, text: str, name: str) -> Any:
    """Return a variable's value: the text itself for text and paths (None if null is allowed), else read as YAML."""
    if _is_text(kind):
        return None if NoneType in typing.get_args(kind) and text.strip() in ("", "null", "~") else text
    try:
        return yaml.safe_load(text)
    except yaml.reader.ReaderError:  # a character that YAML has not, as any beyond ASCII is where Python reads ASCII
        return text
    except yaml.YAMLError as error:
        raise SettingsError(f"variable {name}: cannot be read: {' '.join(str(error).split())}") from error


def _is_text(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _is_text(typing.get_args(kind)[0])
    if origin in (typing.Union, UnionType):
        return all(_is_text(one) for one in typing.get_args(kind) if one is not NoneType)
    return kind in (str, Path) or origin is typing.Literal
