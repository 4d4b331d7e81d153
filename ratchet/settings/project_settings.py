"""The settings of a project: one typed tree, checked once and passed on as values.

`load_settings.load` reads it from the file, variables and options. What follows from other settings is filled in here:
the keys that all agents share, addresses of models in `model_list`, and the places of replicas, store and files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ratchet.errors import SettingsError
from ratchet.proxy.agent_names import check_agent_names, nearest_name
from ratchet.proxy.api_keys import is_loopback
from ratchet.proxy.model_list import ModelEntry
from ratchet.proxy.settings import ProxySettings, secret_values
from ratchet.settings.setting_errors import SKIPPED, listed, readable_errors
from ratchet.settings.state_folder import StateFolder
from ratchet.trainer.planning.memory import MAX_NUM_SEQS
from ratchet.trainer.settings.judge_specs import plugin_traits
from ratchet.trainer.settings.learner_settings import (
    CheckedByPydantic,
    Devices,
    LearnerProcessSettings,
    LearnerSettings,
    Section,
)
from ratchet.trainer.settings.trainer_settings import NO_JUDGE, AdapterSettings, TrainerSettings
from ratchet.tuner.settings import TunerSettings

_Section = TypeVar("_Section", bound=BaseModel)

PREFIX = "RATCHET_"
# Secrets come by variable only. They are not settings, and no file holds them.
SECRETS = frozenset(
    {
        "RATCHET_ALARM_WEBHOOK_URL",
        "RATCHET_API_KEYS",
        "RATCHET_COORDINATOR_TOKEN",
        "RATCHET_GRADER_SECRET",
        "RATCHET_JUDGE_API_KEY",
        "RATCHET_LEARNER_TOKEN",
        "RATCHET_OPERATOR_KEYS",
        "RATCHET_RESAMPLE_API_KEY",
        "RATCHET_UPSTREAM_API_KEY",
    }
)
OTHER_VARIABLES = SECRETS | {"RATCHET_DEBUG"}
STRICT_TOOL_CALLING = "VLLM_ENFORCE_STRICT_TOOL_CALLING"


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL at which this machine reaches a server that listens on `host:port`."""
    scheme = "https" if tls else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class VllmSettings(Section):
    """How vLLM is started."""

    command: tuple[str, ...] = Field((), description="program that starts vLLM's API server; empty: this Python's vLLM")
    host: str = Field("127.0.0.1", description="loopback address that vLLM listens on")
    port: int = Field(8001, ge=0, le=65535, description="port of vLLM, which agents do not use; 0: any free port")
    dtype: str = Field(
        "auto", description="data type of the weights, as vLLM's --dtype; auto: the model's own, without a GPU float32"
    )
    max_model_len: int | None = Field(None, ge=1, description="maximum context length in tokens; null: the model's own")
    max_num_seqs: int = Field(
        MAX_NUM_SEQS, ge=1, description="maximum number of concurrent sequences, as vLLM's --max-num-seqs"
    )
    max_loras: int | None = Field(
        None, ge=2, description="maximum number of adapters in one batch; null: 3 per agent, from 4 to 16"
    )
    max_cpu_loras: int | None = Field(
        None, ge=2, description="maximum number of adapters in memory; null: what all agents may need"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs over which vLLM splits the model")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="fraction of GPU memory for vLLM; null: what the learner's plan leaves"
    )
    devices: Devices = Field(
        None,
        description="GPUs that vLLM uses: 0, or 0,1, or UUIDs; null: the first of those in CUDA_VISIBLE_DEVICES, if "
        "the learner has others",
    )
    tool_call_parser: str = Field(
        "auto", description="vLLM's --tool-call-parser; auto: the one for the model's chat template; none: off"
    )
    reasoning_parser: str = Field(
        "auto",
        description="vLLM's --reasoning-parser, which returns thoughts as `reasoning`, apart from `content`; auto: the "
        "one for the model's chat template; none: off",
    )
    start_timeout_seconds: float = Field(900.0, gt=0, description="seconds in which vLLM must become ready")
    enforce_strict_tool_calling: bool = Field(
        False, description="constrain calls of `strict` tools by a grammar; such calls are not trained on"
    )
    extra_args: tuple[str, ...] = Field((), description="further arguments of vLLM's server, appended last")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables for vLLM")

    @field_validator("host")
    @classmethod
    def _host_is_loopback(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other machines, and any client of vLLM can load adapters and pause it; "
                "use 127.0.0.1 or ::1, and proxy.host for agents on other machines"
            )
        return host

    @field_validator("extra_args")
    @classmethod
    def _arguments_leave_the_address(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            name = argument.partition("=")[0]
            if name in ("--host", "--port", "--uds"):
                raise ValueError(f"{name} is set by Ratchet; use vllm.host or vllm.port")
        return arguments

    @field_validator("env")
    @classmethod
    def _variables_leave_strict_tools(cls, env: dict[str, str]) -> dict[str, str]:
        if STRICT_TOOL_CALLING in env:
            raise ValueError(f"use vllm.enforce_strict_tool_calling in place of {STRICT_TOOL_CALLING}")
        return env

    @property
    def tool_strict_level(self) -> str:
        """When vLLM constrains tool calls by a grammar: `off`, or the value of its --tool-strict-level."""
        if not self.enforce_strict_tool_calling:
            return "off"
        words = " ".join(self.extra_args).replace("=", " ").split()
        return words[words.index("--tool-strict-level") + 1] if "--tool-strict-level" in words[:-1] else "auto"


# Keys of the section `learner` that all agents of the learner share; the others are each agent's own.
SHARED_KEYS = frozenset(field.name for field in dataclasses.fields(LearnerProcessSettings))
_OWN_KEYS = frozenset(field.name for field in dataclasses.fields(LearnerSettings))
# Sections whose keys an agent's entry may set one by one; its other keys replace the shared ones.
_INNER = frozenset({"learner", "release", "resample", "sentinel"})
_SECTIONS = frozenset({"vllm", "adapters", "learner", "trainer", "proxy", "tuner"})
_FILLED_IN: Any = {}  # by a validator


class Settings(Section):
    """All settings of one project."""

    model_config = ConfigDict(validate_default=True)  # a section that is not given is filled in, too

    project: str = Field("default", pattern=r"^[\w.-]+$", description="name of the project and of its state folder")
    state_dir: Path = Field(Path(".ratchet"), description="folder that holds the state of all projects")
    model: str = Field(
        "policy",
        min_length=1,
        max_length=100,
        pattern=r"^[^@/\s]+$",
        description="name of the one agent, which it sends as `model`; several: `agents`",
    )
    base_model: str | None = Field(None, description="folder or hub name of the model to train")
    store: str | None = Field(None, description="database URL; null: SQLite in the state folder")
    min_free_disk_mb: int = Field(500, ge=0, description="minimum free disk in MB; `up` does not start with less")
    max_restarts: int = Field(
        5, ge=0, description="maximum restarts of a service that exited, within ten minutes; 0: never restart"
    )
    model_list: tuple[ModelEntry, ...] = Field((), description="other models by name, as LiteLLM lists them")
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="how vLLM is started")
    adapters: AdapterSettings = Field(default_factory=AdapterSettings, description="where the versions are kept")
    learner: Annotated[LearnerProcessSettings, CheckedByPydantic] = Field(
        default_factory=LearnerProcessSettings, description="what all agents of the learner share"
    )
    # A validator needs the fields above it.
    trainer: TrainerSettings = Field(_FILLED_IN, description="settings of the one agent, or that all share")
    agents: dict[str, TrainerSettings] = Field(default_factory=dict, description="several agents by name")
    proxy: ProxySettings = Field(_FILLED_IN, description="settings of the proxy")
    tuner: TunerSettings = Field(default_factory=TunerSettings, description="settings of the tuner")

    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _sources: Mapping[tuple[str, ...], str] = PrivateAttr(default_factory=dict)
    _environ: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _is_chosen: bool = PrivateAttr(False)  # these settings are those of one of several agents

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        sources: Mapping[tuple[str, ...], str] = MappingProxyType({}),
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Return the settings in the form of ratchet.yaml, checked, with the secrets of `environ`.

        `sources` maps key paths to where their value came from. Raises SettingsError.
        """
        with readable_errors(sources, cls):
            made = cls.model_validate(given, context=environ)
        made._given, made._sources, made._environ = given, sources, environ
        return made

    def changed(self, **values: Any) -> Self:
        """Return settings with other values, checked: a mapping changes keys of its section. Raises SettingsError."""
        sections = {key for key in values if key in _SECTIONS}
        merged = {key: {**(self._given.get(key) or {}), **values[key]} for key in sections}
        made = self.of({**self._given, **values, **merged}, self._sources, self._environ)
        made._is_chosen = self._is_chosen
        return made

    @model_validator(mode="before")
    @classmethod
    def _merge(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Give each agent the shared keys that it does not set, and its part of the section `learner`."""
        learner, vllm = given.get("learner") or {}, given.get("vllm") or {}
        served = vllm.get("dtype") if isinstance(vllm, Mapping) else None
        if served in ("bfloat16", "float32") and learner.get("dtype", "auto") == "auto":
            learner = {**learner, "dtype": served}  # the learner sees what vLLM serves
        own = {key: value for key, value in learner.items() if key in _OWN_KEYS}
        trainer = {**(given.get("trainer") or {}), "learner": own}
        agents = {name: _merged(trainer, entry or {}) for name, entry in (given.get("agents") or {}).items()}
        shared = {key: value for key, value in learner.items() if key in SHARED_KEYS}
        return {**given, "learner": shared, "trainer": trainer, "agents": agents}

    @field_validator("store")
    @classmethod
    def _store_is_possible(cls, store: str | None) -> str | None:
        from ratchet.store.db.engine import check_url
        from ratchet.store.errors import StoreError

        try:
            if store is not None:
                check_url(store)  # opens nothing
        except StoreError as error:
            raise ValueError(str(error).removeprefix("--store ")) from error
        return store

    @field_validator("trainer", mode="before")
    @classmethod
    def _trainer_of_the_project(cls, given: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return _with_project(given, _valid(info.data, *cls._before("trainer")), info.data["model"], "trainer")

    @field_validator("agents", mode="before")
    @classmethod
    def _agents_of_the_project(cls, given: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
        data = _valid(info.data, *cls._before("agents"))
        check_agent_names(tuple(given))
        for name in given:
            if name in (".", ".."):
                raise ValueError(f"agent {name!r}: its files are in a folder of its name; choose another name")
        return {name: _with_project(one, data, name, f"agents.{name}") for name, one in given.items()}

    @field_validator("proxy", mode="before")
    @classmethod
    def _proxy_of_the_project(cls, given: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
        data = _valid(info.data, *cls._before("proxy"))
        derived = {
            "upstreams": (local_url(data["vllm"].host, data["vllm"].port),),
            "model_list": data["model_list"],
            "agents": tuple(data["agents"]) or (data["model"],),
            "store": _store_url(data),
            "journal": _state(data).journal,
        }
        secrets = secret_values(os.environ if info.context is None else info.context, data["model_list"])
        return {"tool_strict_level": data["vllm"].tool_strict_level, **given, **derived, **secrets}

    @field_validator("tuner", mode="before")
    @classmethod
    def _tuner_of_the_project(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, Mapping) or "reflection" not in given:
            return given
        models = _valid(info.data, "model_list")["model_list"]
        return {**given, "reflection": with_address(given["reflection"], models, "tuner.reflection")}

    @classmethod
    def _before(cls, name: str) -> tuple[str, ...]:
        names = tuple(cls.model_fields)
        return names[: names.index(name)]

    @model_validator(mode="after")
    def _fits_vllm(self) -> Self:
        if "--disable-log-stats" in self.vllm.extra_args:
            places = {"trainer": self.trainer} | {f"agents.{name}": one for name, one in self.agents.items()}
            if resampling := [place for place, one in places.items() if one.resample.samples]:
                raise ValueError(
                    f"{resampling[0]}.resample.samples: resampling waits for an idle vLLM, and with "
                    "--disable-log-stats vLLM does not report its load; remove that from vllm.extra_args, or set "
                    "resample.samples to 0"
                )
        return self

    @property
    def given(self) -> Mapping[str, Any]:
        """What the user set, in the form of ratchet.yaml."""
        return self._given

    def given_in(self, section: str) -> Mapping[str, Any]:
        """Return the keys of a section that the user set."""
        return self._given.get(section) or {}

    def is_set(self, *path: str) -> bool:
        """Return whether the user set a key in any layer."""
        return path in self._sources

    @property
    def agents_by_name(self) -> dict[str, TrainerSettings]:
        """The settings of each agent by its name, `model` if no agents are set."""
        return self.agents or {self.model: self.trainer}

    def for_agent(self, name: str) -> Self:
        """Return the settings of one agent alone: `model` is its name, its keys replace those of the shared sections.

        Raises SettingsError that names the nearest agent if there is no such agent.
        """
        if not self.agents and name == self.model:
            return self
        if name not in self.agents:
            known = tuple(self.agents_by_name)
            nearest = nearest_name(name, known)
            hint = f"did you mean {nearest}?" if nearest else f"the agents are {listed(known)}"
            raise SettingsError(f"there is no agent {name!r}; {hint}")
        entry = self._given["agents"][name] or {}
        own = self.proxy_values_of((name,))
        proxy = self.proxy.model_copy(update={"agents": (name,), **own})
        alone = self.model_copy(update={"model": name, "agents": {}, "trainer": self.agents[name], "proxy": proxy})
        alone._given = {
            **{key: value for key, value in self._given.items() if key != "agents"},
            "model": name,
            "trainer": _merged(self.given_in("trainer"), {key: entry[key] for key in entry if key != "learner"}),
            "learner": {**self.given_in("learner"), **(entry.get("learner") or {})},
            "proxy": {**self.given_in("proxy"), **own},
        }
        alone._is_chosen = True
        return alone

    def proxy_values_of(self, agents: Collection[str]) -> dict[str, Any]:
        """Return those of the proxy's settings that name agents, for these alone."""
        limits = {name: limit for name, limit in self.proxy.agent_limits.items() if name in agents}
        return {"agent_limits": limits, "fallbacks": self.proxy.fallbacks.only({*agents, *self.listed_models})}

    @property
    def state(self) -> StateFolder:
        """The folder of this project's state."""
        return _state(dict(self))

    @property
    def store_url(self) -> str:
        """The store's database URL."""
        return _store_url(dict(self))

    @property
    def has_judge(self) -> bool:
        """Whether any agent has a judge; without one nothing is trained."""
        return any(agent.has_judge for agent in self.agents_by_name.values())

    @property
    def listed_models(self) -> tuple[str, ...]:
        """The names in `model_list`, each once."""
        return tuple(dict.fromkeys(entry.model_name for entry in self.model_list))

    def proxy_before(self, upstreams: Sequence[str]) -> ProxySettings:
        """Return the settings of a proxy before other replicas than this project's. Raises SettingsError."""
        level = self.proxy.tool_strict_level if self.is_set("proxy", "tool_strict_level") else "auto"  # vLLM's default
        return with_values(self.proxy, "proxy", upstreams=tuple(upstreams), tool_strict_level=level)

    @property
    def proxy_of_models(self) -> ProxySettings:
        """The settings of a proxy that serves `model_list` alone."""
        fallbacks = self.proxy.fallbacks.only(self.listed_models)
        return with_values(self.proxy, "proxy", upstreams=(), agents=(), agent_limits={}, fallbacks=fallbacks)


def with_values(section: _Section, name: str, **values: Any) -> _Section:
    """Return a section with other values, checked; errors call it `name`. Raises SettingsError."""
    with readable_errors({}, type(section), name):
        return type(section).model_validate({**dict(section), **values})


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared keys of the trainer with an agent's in their place; inner sections are merged, too."""
    inner = {
        key: {**shared[key], **own[key]}
        for key in own.keys() & _INNER & shared.keys()
        if isinstance(shared[key], Mapping) and isinstance(own[key], Mapping)
    }
    return {**shared, **own, **inner}


def _valid(data: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the fields that are valid. One that is not has an error of its own, and what needs it is not checked."""
    if any(name not in data for name in names):
        raise PydanticCustomError(SKIPPED, "not checked")
    return data


def _state(data: Mapping[str, Any]) -> StateFolder:
    return StateFolder((data["state_dir"] / data["project"]).resolve())


def _store_url(data: Mapping[str, Any]) -> str:
    store: str | None = data["store"]
    return store or f"sqlite:///{_state(data).store}"


def _with_project(given: Mapping[str, Any], data: Mapping[str, Any], name: str, section: str) -> dict[str, Any]:
    """Return an agent's keys with what the project's settings say; `section` is what errors call them."""
    state = _state(data)
    made = {
        **given,
        **{key: with_addresses(given[key], data["model_list"], f"{section}.{key}") for key in given if key in _JUDGED},
        "learner_process": data["learner"],
        "vllm": (local_url(data["vllm"].host, data["vllm"].port),),
        "model": name,
        "base_model": data["base_model"] or "",
        "store": _store_url(data),
        "checkpoints": state.checkpoints(name),
        "adapters": data["adapters"],
    }
    made["judge"] = made.get("judge") or NO_JUDGE
    release = made.get("release")
    if isinstance(release, Mapping) and isinstance(tasks := release.get("tasks"), str):
        from ratchet.tuner.tasks import ImportedTasks

        made["release"] = {**release, "tasks": str(ImportedTasks(state.tasks).folder_of(tasks) or tasks)}
    return made


# Models of `model_list` as judges, teachers and reflection models: address, variable of the key, and prices.

_PRICES = ("input_cost_per_token", "output_cost_per_token")
_JUDGED = frozenset({"judge", "release", "sentinel"})  # keys of the trainer that hold judges
_MODEL_KINDS = ("teacher", "ruler")


def with_addresses(value: Any, models: Sequence[ModelEntry], key: str) -> Any:
    """Return a setting with the addresses of the models that its judges name without `base_url`.

    `key` is the setting's name. Raises SettingsError if a model is not named, not listed, or listed more than once.
    """
    if isinstance(value, list | tuple):
        return [with_addresses(one, models, f"{key}.{number}") for number, one in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind")
    if kind in _MODEL_KINDS or (isinstance(kind, str) and plugin_traits(kind).asks_model):
        if value.get("model") is None and value.get("base_url") is None:
            raise SettingsError(
                f"{key}.model: field required: name a model of model_list (it has {_listed(models)}), or one that the "
                f"server at {key}.base_url serves"
            )
        return with_address(value, models, key)
    return {name: with_addresses(one, models, f"{key}.{name}") for name, one in value.items()}


def with_address(setting: Any, models: Sequence[ModelEntry], key: str) -> Any:
    """Return the setting of a model without `base_url` with what `model_list` says about it; what is given wins.

    `key` is the setting's name. Raises SettingsError if the model is not listed, or listed more than once.
    """
    if not isinstance(setting, Mapping) or setting.get("base_url") is not None:
        return setting
    name = setting.get("model")
    if not isinstance(name, str):
        return setting  # the component's settings say what is wrong with it
    what = "teacher" if setting.get("kind") == "teacher" else "model"
    entry = _entry_of(name, models, key, what)
    one = entry.litellm_params
    known: dict[str, Any] = {"base_url": one.base, "api_key_env": one.variable}
    for price in _PRICES[:1] if what == "teacher" else _PRICES:
        cost = getattr(one, price) if getattr(one, price) is not None else entry.model_info.get(price)
        if isinstance(cost, int | float):
            known[price.replace("per_token", "per_million")] = cost * 1e6
    given = {field: value for field, value in setting.items() if value is not None}
    return {**known, **given, "model": one.served_name}


def _entry_of(name: str, models: Sequence[ModelEntry], key: str, what: str) -> ModelEntry:
    found = [entry for entry in models if entry.model_name == name]
    if not found:
        provider = "hosted_vllm/NAME" if what == "teacher" else "openai/NAME"
        raise SettingsError(
            f"{key}.model: the {what} {name!r} is not in model_list, which has {_listed(models)}: add it there as "
            f"{provider} with its api_base, or give {key}.base_url"
        )
    if len(found) > 1:
        raise SettingsError(
            f"{key}.model: model_list has {len(found)} entries of the name {name!r}, and a {what} is one server: give "
            "one of them a name of its own"
        )
    return found[0]


def _listed(models: Sequence[ModelEntry]) -> str:
    return ", ".join(dict.fromkeys(entry.model_name for entry in models)) or "no model"
