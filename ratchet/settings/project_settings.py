"""The settings of a project as values, checked; `load_settings.load` reads them from the file, variables and options.

The sections `proxy`, `trainer`, `learner` and `tuner` stay plain mappings here: each component's own settings class
checks its section when it is asked for, together with what `up` derives for it. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field, PrivateAttr, TypeAdapter, field_validator

from ratchet.errors import SettingsError
from ratchet.proxy.agent_names import check_agent_names, nearest_name
from ratchet.proxy.model_list import ModelEntry
from ratchet.proxy.settings import ProxySettings
from ratchet.settings.setting_errors import Refused, is_option, key_tree, listed, readable_errors
from ratchet.settings.state_folder import StateFolder
from ratchet.trainer.errors import SettingError
from ratchet.trainer.planning.memory import MAX_NUM_SEQS
from ratchet.trainer.settings.judge_specs import plugin_traits
from ratchet.trainer.settings.learner_settings import (
    SERVABLE_RANKS,
    Devices,
    LearnerProcessSettings,
    LearnerSettings,
    Section,
)
from ratchet.trainer.settings.trainer_sections import AdapterSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.tuner.settings import TunerSettings

# The section `learner`: hyperparameters that an agent may override, and what all agents of the learner share.

_SHARED = frozenset(field.name for field in dataclasses.fields(LearnerProcessSettings))
_OWN = frozenset(field.name for field in dataclasses.fields(LearnerSettings))


def learner_keys() -> dict[str, Any]:
    """Return the keys of the section with their types."""
    return key_tree(LearnerSettings) | key_tree(LearnerProcessSettings)


def parse_learner(
    section: Mapping[str, Any], sources: Mapping[tuple[str, ...], str], path: tuple[str, ...] = ("learner",)
) -> tuple[LearnerSettings, LearnerProcessSettings]:
    """Return the two parts of the section, which the settings name `path`. Raises SettingsError."""
    own = {key: value for key, value in section.items() if key in _OWN}
    shared = {key: value for key, value in section.items() if key in _SHARED}
    with readable_errors(sources, LearnerSettings, *path, also=SettingError):
        return (
            TypeAdapter(LearnerSettings).validate_python(own),
            TypeAdapter(LearnerProcessSettings).validate_python(shared),
        )


# Models of `model_list` as judges, teachers and reflection models: address, variable of the key, and prices.

_PRICES = ("input_cost_per_token", "output_cost_per_token")
_MODEL_KINDS = ("teacher", "ruler")


def judge_with_address(judge: Any, models: Sequence[ModelEntry], key: str) -> Any:
    """Return a judge's setting with the addresses of the models that it names without `base_url`, its parts' too.

    `key` is the setting's name. Raises SettingsError if a model is not named, not listed, or listed more than once.
    """
    if not isinstance(judge, Mapping):
        return judge
    kind = judge.get("kind")
    if kind in _MODEL_KINDS or (isinstance(kind, str) and plugin_traits(kind).asks_model):
        if judge.get("model") is None and judge.get("base_url") is None:
            raise SettingsError(
                f"{key}.model: field required: name a model of model_list (it has {_listed(models)}), or one that the "
                f"server at {key}.base_url serves"
            )
        return with_address(judge, models, key)
    if kind == "composite" and isinstance(parts := judge.get("parts"), Sequence):
        places = [f"{key}.parts.{number}" for number in range(len(parts))]
        return {**judge, "parts": [_with_inner(part, models, at) for part, at in zip(parts, places, strict=True)]}
    if kind == "by_family" and isinstance(judges := judge.get("judges"), Mapping):
        inner = {name: judge_with_address(one, models, f"{key}.judges.{name}") for name, one in judges.items()}
        return {**judge, "judges": inner, "other": judge_with_address(judge.get("other"), models, f"{key}.other")}
    return judge


def _with_inner(part: Any, models: Sequence[ModelEntry], key: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {**part, "judge": judge_with_address(part.get("judge"), models, f"{key}.judge")}


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


# The section `agents`: the keys of an agent's entry, and how an entry and the shared sections make its settings.
#
# An entry takes every key of `trainer` that one agent can have for itself, the keys of `learner` that not all agents
# share, and `share`. Keys that belong to a process or to all agents are refused with the place where they belong.

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
    refusal = "is shared by all agents of the learner: set learner."
    learner = {key: Refused(f"{refusal}{key}") if key in _SHARED else kind for key, kind in learner_keys().items()}
    return {**keys, "learner": learner}


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
# Keys that Ratchet derives from the project's settings; a user cannot set them.
DERIVED_PROXY = frozenset({"upstreams", "model", "agents", "store", "journal", "key_hashes", "operator_hashes",
                           "upstream_key", "model_list", "model_keys", "alarm_webhook_url",
                           "coordinator_token"})  # fmt: skip
DERIVED_TRAINER = frozenset({"vllm", "model", "base_model", "store", "checkpoints", "adapters", "learner",
                             "learner_process"})  # fmt: skip


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
    max_lora_rank: int | None = Field(None, ge=1, description="maximum LoRA rank; null: fits learner.lora_r")
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
    cpu_kvcache_gb: int = Field(1, ge=1, description="on a CPU: GiB of memory for the KV cache")
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
        from ratchet.proxy.api_keys import is_loopback

        if not is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other machines, and any client of vLLM can load adapters and pause it; "
                "use 127.0.0.1 or ::1, and proxy.host for agents on other machines"
            )
        return host

    @field_validator("max_lora_rank")
    @classmethod
    def _rank_is_one_of_vllm(cls, rank: int | None) -> int | None:
        if rank is not None and rank not in SERVABLE_RANKS:
            raise ValueError(f"{rank} is not a rank of vLLM; use one of {', '.join(map(str, SERVABLE_RANKS))}")
        return rank

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


class Settings(Section):
    """All settings of one project."""

    project: str = Field("default", pattern=r"^[\w.-]+$", description="name of the project and of its state folder")
    state_dir: Path = Field(Path(".ratchet"), description="folder that holds the state of all projects")
    model: str = Field(
        "policy",
        min_length=1,
        max_length=100,
        pattern=r"^[^@/\s]+$",
        description="name of the one agent, which it sends as `model`; several: `agents`",
    )
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict, description="several agents by name")
    base_model: str | None = Field(None, description="folder or hub name of the model to train")
    store: str | None = Field(None, description="database URL; null: SQLite in the state folder")
    min_free_disk_mb: int = Field(500, ge=0, description="minimum free disk in MB; `up` does not start with less")
    max_restarts: int = Field(
        5, ge=0, description="maximum restarts of a service that exited, within ten minutes; 0: never restart"
    )
    model_list: tuple[ModelEntry, ...] = Field((), description="other models by name, as LiteLLM lists them")
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="how vLLM is started")
    adapters: AdapterSettings = Field(default_factory=AdapterSettings, description="where the versions are kept")
    proxy: dict[str, Any] = Field(default_factory=dict, description="settings of the proxy")
    trainer: dict[str, Any] = Field(default_factory=dict, description="settings of the trainer")
    learner: dict[str, Any] = Field(default_factory=dict, description="settings of the learner")
    tuner: dict[str, Any] = Field(default_factory=dict, description="settings of the tuner")

    _sources: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)
    _entry: str | None = PrivateAttr(None)  # these settings are those of this entry of `agents`

    @field_validator("agents")
    @classmethod
    def _names_of_agents(cls, agents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        check_entries(agents)
        return agents

    @property
    def agents_by_name(self) -> dict[str, Settings]:
        """The settings of each agent by its name, `model` if no agents are set."""
        return {name: self.for_agent(name) for name in self.agents} if self.agents else {self.model: self}

    def for_agent(self, name: str) -> Settings:
        """Return the settings of one agent alone: `model` is its name, its keys replace those of the shared sections.

        Raises SettingsError if there is no such agent.
        """
        if not self.agents and name == self.model:
            return self
        entry = entry_of(self.agents or {self.model: {}}, name)
        # A command-line option such as --judge sets a key of `trainer`, and is stronger than the entry.
        by_option = {path[1] for path, source in self._sources.items()
                     if path[0] == "trainer" and is_option(source)}  # fmt: skip
        own = {key: value for key, value in entry.items() if key != "learner" and key not in by_option}
        known = agent_keys(DERIVED_TRAINER)
        merged = {
            "model": name,
            "agents": {},
            "trainer": merged_section(self.trainer, own, known),
            "learner": {**self.learner, **entry.get("learner", {})},
        }
        alone = self.model_copy(update=merged)
        alone._entry = name
        return alone

    @property
    def state(self) -> StateFolder:
        """The folder of this project's state."""
        return StateFolder((self.state_dir / self.project).resolve())

    @property
    def store_url(self) -> str:
        """The store's database URL."""
        return self.store or f"sqlite:///{self.state.store}"

    @property
    def has_judge(self) -> bool:
        """Whether any agent has a judge; without one nothing is trained."""
        return any(agent.trainer.get("judge") for agent in self.agents_by_name.values())

    @property
    def learner_devices(self) -> str | None:
        """The GPUs that the learner uses, in the form of CUDA_VISIBLE_DEVICES; None: not set here."""
        devices: str | None = TypeAdapter(Devices).validate_python(self.learner.get("devices"))
        return devices

    def is_set(self, *path: str) -> bool:
        """Return whether the user set a key in any layer."""
        return path in self._sources

    def proxy_settings(self, environ: Mapping[str, str] = os.environ, **values: Any) -> ProxySettings:
        """Return the proxy's settings; `values` override the section. Raises SettingsError."""
        derived = {
            "upstreams": (local_url(self.vllm.host, self.vllm.port),),
            "model_list": self.model_list,
            **({"agents": tuple(self.agents)} if self.agents else {"model": self.model}),
            "store": self.store_url,
            "journal": self.state.journal,
        }
        own = {} if "upstreams" in values else {"tool_strict_level": self.vllm.tool_strict_level}
        if self._entry and isinstance(limits := self.proxy.get("agent_limits"), dict):
            derived["agent_limits"] = {name: limit for name, limit in limits.items() if name == self.model}
        if self._entry and isinstance(self.proxy.get("fallbacks"), dict):
            derived["fallbacks"] = self._own_fallbacks(self.proxy["fallbacks"], (self.model,))
        with readable_errors(self._sources, ProxySettings, "proxy"):
            return ProxySettings.read(environ, **(own | self.proxy | derived | values))

    @property
    def listed_models(self) -> tuple[str, ...]:
        """The names in `model_list`, each once."""
        return tuple(dict.fromkeys(entry.model_name for entry in self.model_list))

    @property
    def models_only(self) -> dict[str, Any]:
        """The values of `proxy_settings` for a proxy that serves `model_list` alone."""
        reasons = self.proxy.get("fallbacks")
        fallbacks = self._own_fallbacks(reasons, ()) if isinstance(reasons, dict) else {}
        return {"upstreams": (), "model": "", "agents": (), "agent_limits": {}, "fallbacks": fallbacks}

    def _own_fallbacks(self, reasons: Mapping[str, Any], agents: Collection[str]) -> dict[str, Any]:
        """Return the rules of these agents and of the models of `model_list`."""
        known = {*agents, *self.listed_models}
        return {
            reason: {name: others for name, others in rules.items() if name in known}
            if isinstance(rules, dict)
            else rules
            for reason, rules in reasons.items()
        }

    def trainer_settings(self, **values: Any) -> TrainerSettings:
        """Return the trainer's settings; `values` override the section. Raises SettingsError."""

        section = ("agents", self._entry) if self._entry else ("trainer",)
        learner_section = (*section, "learner") if self._entry else ("learner",)
        learner, learner_process = parse_learner(self._learner(), self._sources, learner_section)
        derived = {
            "learner": learner,
            "learner_process": learner_process,
            "vllm": (local_url(self.vllm.host, self.vllm.port),),
            "model": self.model,
            "base_model": self.base_model,
            "store": self.store_url,
            "checkpoints": self.state.checkpoints(self.model),
            "adapters": self.adapters,
        }
        given = self.trainer | self._release() | derived | values
        if "judge" in given:
            given["judge"] = judge_with_address(given["judge"], self.model_list, ".".join((*section, "judge")))
        for part in ("sentinel", "release"):
            if isinstance(own := given.get(part), dict) and "second_judge" in own:
                key = ".".join((*section, part, "second_judge"))
                second = judge_with_address(own["second_judge"], self.model_list, key)
                given[part] = {**own, "second_judge": second}
        with readable_errors(self._sources, TrainerSettings, *section, also=SettingError):
            return TrainerSettings(**given)

    def learner_process_settings(self) -> LearnerProcessSettings:
        """Return what the learner is started with. Raises SettingsError."""
        return parse_learner(self._learner(), self._sources)[1]

    def _learner(self) -> dict[str, Any]:
        """Return the section `learner`, in whose `dtype` the learner sees what vLLM serves unless it is set."""
        served = {"dtype": self.vllm.dtype} if self.vllm.dtype in ("bfloat16", "float32") else {}
        return served | {key: value for key, value in self.learner.items() if (key, value) != ("dtype", "auto")}

    def _release(self) -> dict[str, Any]:
        """Return the `release` section with the name of an imported task set replaced by its folder."""
        release = self.trainer.get("release")
        if not isinstance(release, dict) or not isinstance(release.get("tasks"), str):
            return {}
        from ratchet.tuner.tasks import ImportedTasks

        folder = ImportedTasks(self.state.tasks).folder_of(release["tasks"])
        return {"release": {**release, "tasks": str(folder)}} if folder else {}

    def tuner_settings(self) -> TunerSettings:
        """Return the tuner's settings. Raises SettingsError."""

        given = dict(self.tuner)
        if "reflection" in given:
            given["reflection"] = with_address(given["reflection"], self.model_list, "tuner.reflection")
        with readable_errors(self._sources, TunerSettings, "tuner"):
            return TunerSettings(**given)
