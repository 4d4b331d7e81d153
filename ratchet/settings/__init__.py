"""The settings of a project: defaults, then `ratchet.yaml`, then `RATCHET_*` variables, then options. Later wins.

Promises: an unknown key is an error that names file, key path and the nearest known key; a wrong value is an error that
names where it came from; no secret can stand in a file. Reading needs no torch. Rooms get their own settings objects,
made here once and passed on as values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, field_validator

from ratchet.errors import SettingsError
from ratchet.proxy.model_list import ModelEntry
from ratchet.settings.layers import Layers, explain
from ratchet.settings.state_folder import StateFolder
from ratchet.trainer.settings.devices import Devices
from ratchet.urls import url

if TYPE_CHECKING:
    from ratchet.proxy.settings import ProxySettings
    from ratchet.trainer.settings.trainer_settings import TrainerSettings
    from ratchet.tuner.settings.tuner_settings import TunerSettings

CONFIG_FILE = "ratchet.yaml"
PREFIX = "RATCHET_"
# Read elsewhere: secrets, and the switch for tracebacks. They are no settings and never written down.
SECRETS = frozenset(
    {
        "RATCHET_API_KEYS",
        "RATCHET_GRADER_SECRET",
        "RATCHET_JUDGE_API_KEY",
        "RATCHET_OPERATOR_KEYS",
        "RATCHET_RESAMPLE_API_KEY",
        "RATCHET_UPSTREAM_API_KEY",
    }
)
OTHER_VARIABLES = SECRETS | {"RATCHET_DEBUG"}
STRICT_TOOL_CALLING = "VLLM_ENFORCE_STRICT_TOOL_CALLING"
# What `up` works out for the rooms from the settings of the project; these keys are not settings of a section.
DERIVED_PROXY = frozenset({"upstreams", "model", "store", "journal", "key_hashes", "operator_hashes", "upstream_key",
                           "model_list", "model_keys"})  # fmt: skip
DERIVED_TRAINER = frozenset({"vllm", "model", "base_model", "store", "checkpoints"})


class VllmSettings(BaseModel):
    """How vLLM is started."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: tuple[str, ...] = Field((), description="program that starts vLLM's API server; empty: this Python's vLLM")
    host: str = Field("127.0.0.1", description="address of this machine alone that vLLM listens on")
    port: int = Field(8001, ge=0, le=65535, description="port of vLLM, which agents do not use; 0 takes any free one")
    dtype: str = Field("auto", description="number type of the weights, as vLLM's --dtype")
    max_model_len: int | None = Field(None, ge=1, description="longest context in tokens; null: the model's own")
    max_num_seqs: int | None = Field(None, ge=1, description="calls generated at once; null: vLLM's own")
    max_lora_rank: int | None = Field(None, ge=1, description="largest LoRA rank; null: fits trainer.learner.lora_r")
    max_loras: int = Field(4, ge=2, description="adapter versions that can serve in one batch")
    gpu_memory_utilization: float = Field(
        0.5, gt=0, le=1, description="share of GPU memory for vLLM; the trainer needs the rest"
    )
    devices: Devices = Field(
        None, description="GPUs that vLLM sees: 0, or 0,1, or UUIDs; null: as CUDA_VISIBLE_DEVICES says"
    )
    cpu_kvcache_gb: int = Field(1, ge=1, description="without a GPU: GiB of memory for the KV cache")
    tool_call_parser: str = Field(
        "auto", description="vLLM's --tool-call-parser; auto: by the model's family; none: off"
    )
    start_timeout_seconds: float = Field(900.0, gt=0, description="seconds until vLLM must be ready")
    enforce_strict_tool_calling: bool = Field(
        False, description="hold the calls of `strict` tools to a grammar; such calls are then not trained"
    )
    extra_args: tuple[str, ...] = Field((), description="further arguments of vLLM's server, given last")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables of vLLM")

    @field_validator("host")
    @classmethod
    def _is_not_open(cls, host: str) -> str:
        from ratchet.proxy.api_keys import is_loopback

        if not is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other machines, and whoever reaches vLLM can load adapters and pause it; "
                "use 127.0.0.1 or ::1, and proxy.host for agents on other machines"
            )
        return host

    @field_validator("extra_args")
    @classmethod
    def _leaves_the_address_alone(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            name = argument.partition("=")[0]
            if name in ("--host", "--port", "--uds"):
                raise ValueError(f"{name} is chosen by Ratchet; set vllm.host or vllm.port")
        return arguments

    @field_validator("env")
    @classmethod
    def _leaves_the_grammar_alone(cls, env: dict[str, str]) -> dict[str, str]:
        if STRICT_TOOL_CALLING in env:
            raise ValueError(f"{STRICT_TOOL_CALLING} is set by vllm.enforce_strict_tool_calling: set that instead")
        return env

    @property
    def tool_strict_level(self) -> str:
        """When vLLM holds tool calls to a grammar: `off`, or its --tool-strict-level."""
        if not self.enforce_strict_tool_calling:
            return "off"
        told = " ".join(self.extra_args).replace("=", " ").split()
        return told[told.index("--tool-strict-level") + 1] if "--tool-strict-level" in told[:-1] else "auto"


class Settings(BaseModel):
    """Everything that one project can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    project: str = Field("default", pattern=r"^[\w.-]+$", description="name of the project and of its state folder")
    folder: Path = Field(Path(".ratchet"), description="folder that holds the state of all projects")
    model: str = Field(
        "policy",
        min_length=1,
        max_length=100,
        pattern=r"^[^@/\s]+$",
        description="alias that agents ask for as `model`",
    )
    base_model: str | None = Field(None, description="folder or hub name of the model that learns")
    store: str | None = Field(None, description="database URL; null: SQLite in the state folder")
    min_free_disk_mb: int = Field(500, ge=0, description="`up` refuses to start with less free disk than this")
    restarts: int = Field(
        5, ge=0, description="how often `up` starts a room again that died, within ten minutes; 0: never"
    )
    model_list: tuple[ModelEntry, ...] = Field((), description="other models by name, as LiteLLM lists them")
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="how vLLM is started")
    proxy: dict[str, Any] = Field(default_factory=dict, description="settings of the proxy")
    trainer: dict[str, Any] = Field(default_factory=dict, description="settings of the trainer")
    tuner: dict[str, Any] = Field(default_factory=dict, description="settings of the tuner")

    _sources: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def state(self) -> StateFolder:
        """Where this project's state lives."""
        return StateFolder((self.folder / self.project).resolve())

    @property
    def store_url(self) -> str:
        """The store's database URL."""
        return self.store or f"sqlite:///{self.state.store}"

    @property
    def has_judge(self) -> bool:
        """Whether a judge is named; without one nothing can be trained."""
        return bool(self.trainer.get("judge"))

    @property
    def trainer_devices(self) -> str | None:
        """The GPUs that the trainer sees, as CUDA has it; None: as the environment says."""
        devices: str | None = TypeAdapter(Devices).validate_python(self.trainer.get("devices"))
        return devices

    def chosen(self, *path: str) -> bool:
        """Return whether the user set a key anywhere, so that it must not be changed silently."""
        return path in self._sources

    def proxy_settings(self, environ: Mapping[str, str] = os.environ, **values: Any) -> ProxySettings:
        """Return the proxy's settings; `values` come last. Raises SettingsError."""
        from ratchet.proxy.settings import ProxySettings

        derived = {
            "upstreams": (url(self.vllm.host, self.vllm.port),),
            "model": self.model,
            "model_list": self.model_list,
            "store": self.store_url,
            "journal": self.state.journal,
        }
        own = {} if "upstreams" in values else {"tool_strict_level": self.vllm.tool_strict_level}
        with explain(self._sources, "proxy"):
            return ProxySettings.read(environ, **(own | self.proxy | derived | values))

    def trainer_settings(self, **values: Any) -> TrainerSettings:
        """Return the trainer's settings; `values` come last. Raises SettingsError."""
        from ratchet.trainer.errors import SettingError
        from ratchet.trainer.settings.trainer_settings import TrainerSettings

        derived = {
            "vllm": (url(self.vllm.host, self.vllm.port),),
            "model": self.model,
            "base_model": self.base_model,
            "store": self.store_url,
            "checkpoints": self.state.checkpoints(self.model),
        }
        with explain(self._sources, "trainer", also=SettingError):
            return TrainerSettings(**(self.trainer | self._gate() | derived | values))

    def _gate(self) -> dict[str, Any]:
        """Return the gate's section with an imported task set's folder in place of its name."""
        gate = self.trainer.get("release")
        if not isinstance(gate, dict) or not isinstance(gate.get("tasks"), str):
            return {}
        from ratchet.tuner.tasks.imported import ImportedTasks

        folder = ImportedTasks(self.state.tasks).folder_of(gate["tasks"])
        return {"release": {**gate, "tasks": str(folder)}} if folder else {}

    def tuner_settings(self) -> TunerSettings:
        """Return the tuner's settings. Raises SettingsError."""
        from ratchet.tuner.settings.tuner_settings import TunerSettings

        with explain(self._sources, "tuner"):
            return TunerSettings(**self.tuner)


def known_keys() -> dict[str, Any]:
    """Return the tree of settings: a key's type, or a mapping for a section."""
    from ratchet.proxy.settings import ProxySettings
    from ratchet.settings.layers import tree
    from ratchet.trainer.settings.trainer_settings import TrainerSettings
    from ratchet.tuner.settings.tuner_settings import TunerSettings

    keys = tree(Settings)
    keys["proxy"] = {key: kind for key, kind in tree(ProxySettings).items() if key not in DERIVED_PROXY}
    keys["trainer"] = {key: kind for key, kind in tree(TrainerSettings).items() if key not in DERIVED_TRAINER}
    keys["tuner"] = tree(TunerSettings)
    return keys


def load(
    config: Path | None = None,
    options: Mapping[tuple[str, ...], tuple[str, Any]] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Read the settings of the project in the current folder.

    config   a settings file; None reads `ratchet.yaml` where there is one
    options  key path -> (the option's name for messages, value); None values are not set

    Raises SettingsError.
    """
    layers = Layers(known_keys())
    if config is None and Path(CONFIG_FILE).is_file():
        config = Path(CONFIG_FILE)
    if config is not None:
        layers.add_file(config)
    layers.add_variables(environ, PREFIX, OTHER_VARIABLES)
    for path, (name, value) in (options or {}).items():
        if value is not None:
            layers.set(path, value, name)
    with explain(layers.sources):
        settings = Settings(**layers.values)
    settings._sources.update(layers.sources)
    _check_store(settings)
    settings.proxy_settings(environ)
    settings.tuner_settings()
    _check_load_is_reported(settings)
    # A wrong trainer setting is told at once, also while nothing is trained yet.
    settings.trainer_settings(
        base_model=settings.base_model or "unset", judge=settings.trainer.get("judge") or "unset:unset"
    )
    return settings


def _check_store(settings: Settings) -> None:
    """Raise SettingsError where the store that was named can be none; nothing is opened."""
    if settings.store is None:
        return
    from ratchet.store.db.engine import check_url
    from ratchet.store.errors import StoreError

    try:
        check_url(settings.store)
    except StoreError as error:
        source = settings._sources.get(("store",), "store")
        raise SettingsError(f"{source}: {str(error).removeprefix('--store ')}") from error


def _check_load_is_reported(settings: Settings) -> None:
    """Raise SettingsError where shadow calls would wait for ever for a vLLM that does not say whether it is idle."""
    wanted = (settings.trainer.get("resample") or {}).get("samples")
    if wanted and "--disable-log-stats" in settings.vllm.extra_args:
        raise SettingsError(
            "trainer.resample.samples: shadow calls wait for an idle vLLM, and with --disable-log-stats it does "
            "not tell "
            "whether it is; take that out of vllm.extra_args, or set trainer.resample.samples to 0"
        )
