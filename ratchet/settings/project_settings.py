"""The settings of a project as values, checked. `load_settings.load` reads them from the file, variables and options.

The sections `proxy`, `trainer`, `learner` and `tuner` stay plain mappings here: each component's own settings class
checks its section when it is asked for, together with what `up` derives for it. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, field_validator

from ratchet.proxy.model_list import ModelEntry
from ratchet.settings.setting_errors import is_option, readable_errors
from ratchet.settings.state_folder import StateFolder
from ratchet.trainer.planning.gpu_memory import MAX_NUM_SEQS
from ratchet.trainer.settings.adapter_and_memory import SERVABLE_RANKS
from ratchet.trainer.settings.adapter_settings import AdapterSettings
from ratchet.trainer.settings.value_types import Devices

if TYPE_CHECKING:
    from ratchet.proxy.settings import ProxySettings
    from ratchet.trainer.settings.learner_process_settings import LearnerProcessSettings
    from ratchet.trainer.settings.trainer_settings import TrainerSettings
    from ratchet.tuner.settings.tuner_settings import TunerSettings

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


class VllmSettings(BaseModel):
    """How vLLM is started."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

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


class Settings(BaseModel):
    """All settings of one project."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

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
        from ratchet.settings.agent_entries import check_entries

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
        from ratchet.settings import agent_entries

        if not self.agents and name == self.model:
            return self
        entry = agent_entries.entry_of(self.agents or {self.model: {}}, name)
        # A command-line option such as --judge sets a key of `trainer`, and is stronger than the entry.
        by_option = {path[1] for path, source in self._sources.items()
                     if path[0] == "trainer" and is_option(source)}  # fmt: skip
        own = {key: value for key, value in entry.items() if key != "learner" and key not in by_option}
        known = agent_entries.agent_keys(DERIVED_TRAINER)
        merged = {
            "model": name,
            "agents": {},
            "trainer": agent_entries.merged_section(self.trainer, own, known),
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
        from ratchet.proxy.settings import ProxySettings

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
        from ratchet.settings.learner_section import parse_learner
        from ratchet.settings.model_address import judge_with_address
        from ratchet.trainer.errors import SettingError
        from ratchet.trainer.settings.trainer_settings import TrainerSettings

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
        from ratchet.settings.learner_section import parse_learner

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
        from ratchet.tuner.tasks.imported import ImportedTasks

        folder = ImportedTasks(self.state.tasks).folder_of(release["tasks"])
        return {"release": {**release, "tasks": str(folder)}} if folder else {}

    def tuner_settings(self) -> TunerSettings:
        """Return the tuner's settings. Raises SettingsError."""
        from ratchet.settings.model_address import with_address
        from ratchet.tuner.settings.tuner_settings import TunerSettings

        given = dict(self.tuner)
        if "reflection" in given:
            given["reflection"] = with_address(given["reflection"], self.model_list, "tuner.reflection")
        with readable_errors(self._sources, TunerSettings, "tuner"):
            return TunerSettings(**given)
