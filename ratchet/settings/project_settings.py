"""The settings of a project as values, checked. `load_settings.load` reads them from the file, variables and options.

The sections `proxy`, `trainer` and `tuner` stay plain mappings here: each component's own settings class checks its
section when it is asked for, together with what `up` derives for it. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, field_validator

from ratchet.proxy.model_list import ModelEntry
from ratchet.settings.setting_errors import readable_errors
from ratchet.settings.state_folder import StateFolder
from ratchet.trainer.settings.value_types import Devices

if TYPE_CHECKING:
    from ratchet.proxy.settings import ProxySettings
    from ratchet.trainer.settings.trainer_settings import TrainerSettings
    from ratchet.tuner.settings.tuner_settings import TunerSettings

PREFIX = "RATCHET_"
# Secrets come by variable only. They are not settings, and no file holds them.
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
# Keys that Ratchet derives from the project's settings; a user cannot set them.
DERIVED_PROXY = frozenset({"upstreams", "model", "store", "journal", "key_hashes", "operator_hashes", "upstream_key",
                           "model_list", "model_keys"})  # fmt: skip
DERIVED_TRAINER = frozenset({"vllm", "model", "base_model", "store", "checkpoints"})


def local_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on `host:port`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class VllmSettings(BaseModel):
    """How vLLM is started."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: tuple[str, ...] = Field((), description="program that starts vLLM's API server; empty: this Python's vLLM")
    host: str = Field("127.0.0.1", description="loopback address that vLLM listens on")
    port: int = Field(8001, ge=0, le=65535, description="port of vLLM, which agents do not use; 0: any free port")
    dtype: str = Field("auto", description="data type of the weights, as vLLM's --dtype")
    max_model_len: int | None = Field(None, ge=1, description="maximum context length in tokens; null: the model's own")
    max_num_seqs: int | None = Field(
        None, ge=1, description="maximum number of concurrent sequences; null: vLLM's default"
    )
    max_lora_rank: int | None = Field(None, ge=1, description="maximum LoRA rank; null: fits trainer.learner.lora_r")
    max_loras: int = Field(4, ge=2, description="maximum number of adapters in one batch")
    gpu_memory_utilization: float = Field(
        0.5, gt=0, le=1, description="fraction of GPU memory for vLLM; the trainer uses the rest"
    )
    devices: Devices = Field(
        None, description="GPUs that vLLM uses: 0, or 0,1, or UUIDs; null: those in CUDA_VISIBLE_DEVICES"
    )
    cpu_kvcache_gb: int = Field(1, ge=1, description="on a CPU: GiB of memory for the KV cache")
    tool_call_parser: str = Field("auto", description="vLLM's --tool-call-parser; auto: by model family; none: off")
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

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    project: str = Field("default", pattern=r"^[\w.-]+$", description="name of the project and of its state folder")
    state_dir: Path = Field(Path(".ratchet"), description="folder that holds the state of all projects")
    model: str = Field(
        "policy",
        min_length=1,
        max_length=100,
        pattern=r"^[^@/\s]+$",
        description="alias that agents send as `model`",
    )
    base_model: str | None = Field(None, description="folder or hub name of the model to train")
    store: str | None = Field(None, description="database URL; null: SQLite in the state folder")
    min_free_disk_mb: int = Field(500, ge=0, description="minimum free disk in MB; `up` does not start with less")
    max_restarts: int = Field(
        5, ge=0, description="maximum restarts of a service that exited, within ten minutes; 0: never restart"
    )
    model_list: tuple[ModelEntry, ...] = Field((), description="other models by name, as LiteLLM lists them")
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="how vLLM is started")
    proxy: dict[str, Any] = Field(default_factory=dict, description="settings of the proxy")
    trainer: dict[str, Any] = Field(default_factory=dict, description="settings of the trainer")
    tuner: dict[str, Any] = Field(default_factory=dict, description="settings of the tuner")

    _sources: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

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
        """Whether a judge is set; without one nothing is trained."""
        return bool(self.trainer.get("judge"))

    @property
    def trainer_devices(self) -> str | None:
        """The GPUs that the trainer uses, in the form of CUDA_VISIBLE_DEVICES; None: not set here."""
        devices: str | None = TypeAdapter(Devices).validate_python(self.trainer.get("devices"))
        return devices

    def is_set(self, *path: str) -> bool:
        """Return whether the user set a key in any layer."""
        return path in self._sources

    def proxy_settings(self, environ: Mapping[str, str] = os.environ, **values: Any) -> ProxySettings:
        """Return the proxy's settings; `values` override the section. Raises SettingsError."""
        from ratchet.proxy.settings import ProxySettings

        derived = {
            "upstreams": (local_url(self.vllm.host, self.vllm.port),),
            "model": self.model,
            "model_list": self.model_list,
            "store": self.store_url,
            "journal": self.state.journal,
        }
        own = {} if "upstreams" in values else {"tool_strict_level": self.vllm.tool_strict_level}
        with readable_errors(self._sources, "proxy"):
            return ProxySettings.read(environ, **(own | self.proxy | derived | values))

    def trainer_settings(self, **values: Any) -> TrainerSettings:
        """Return the trainer's settings; `values` override the section. Raises SettingsError."""
        from ratchet.trainer.errors import SettingError
        from ratchet.trainer.settings.trainer_settings import TrainerSettings

        derived = {
            "vllm": (local_url(self.vllm.host, self.vllm.port),),
            "model": self.model,
            "base_model": self.base_model,
            "store": self.store_url,
            "checkpoints": self.state.checkpoints(self.model),
        }
        with readable_errors(self._sources, "trainer", also=SettingError):
            return TrainerSettings(**(self.trainer | self._release() | derived | values))

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
        from ratchet.tuner.settings.tuner_settings import TunerSettings

        with readable_errors(self._sources, "tuner"):
            return TunerSettings(**self.tuner)
