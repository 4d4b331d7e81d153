"""The settings of workers and their coordinator, on one machine or several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from ratchet.proxy.errors import StartError
from ratchet.store.access.replicas import check_entry

TOKEN_VARIABLE = "RATCHET_COORDINATOR_TOKEN"
_MIN_TOKEN_LENGTH = 16
_CORES_PER_WORKER, _MOST_AUTO_WORKERS = 8, 4  # vLLM, trainer and learner need cores, too


class CoordinationSettings(BaseModel):
    """A part of `ProxySettings`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    workers: int = Field(
        1,
        ge=0,
        le=64,
        description="processes that serve the port; with more than one, another process, the coordinator, assigns "
        "their calls to trajectories (see [production.md](production.md)); 0: a coordinator only; `auto`, which "
        "`ratchet up` takes by default: one for every eight cores, from 1 to 4",
    )
    coordinator: tuple[str, ...] = Field(
        (),
        description="URLs of the coordinators that this proxy's workers use instead of their own: those that listen at "
        "`coordinator_listen` on this or other machines; of several, one is active and the others are standbys; "
        "`dns+http://NAME:PORT` is every address of a name; needs RATCHET_COORDINATOR_TOKEN",
    )
    coordinator_listen: str | None = Field(
        None,
        description="`ADDRESS:PORT` where this proxy's coordinator also answers the workers of other machines; needs "
        "RATCHET_COORDINATOR_TOKEN; null: it serves only its own workers",
    )
    coordinator_token: SecretStr | None = Field(
        None, description="the secret that coordinators and workers of all machines share"
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _by_cores(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip().isdigit():
            if value != "auto":
                raise ValueError("give a number of processes, or `auto`")
            return workers_for(usable_cores())
        return value

    @field_validator("coordinator", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(one.strip() for one in value.split(",") if one.strip()) if isinstance(value, str) else value

    @field_validator("coordinator")
    @classmethod
    def _coordinator_urls(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_entry, entries))

    @field_validator("coordinator_listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            listen_address(value)
        return value

    @model_validator(mode="after")
    def _something_runs(self) -> Self:
        if self.workers == 0 and self.coordinator_listen is None:
            raise ValueError("workers is 0, so that nothing is served: set coordinator_listen to run a coordinator")
        return self

    def check_token(self) -> None:
        """Raise StartError without a token that protects the coordinators. Services that run none need none."""
        setting = "coordinator_listen" if self.coordinator_listen else "coordinator" if self.coordinator else None
        token = self.coordinator_token.get_secret_value() if self.coordinator_token else ""
        if setting and len(token) < _MIN_TOKEN_LENGTH:
            raise StartError(
                f"{setting} needs {TOKEN_VARIABLE}, a secret of at least {_MIN_TOKEN_LENGTH} characters, the same on "
                "every machine: set it, for example to the output of `openssl rand -hex 24`"
            )

    @property
    def has_own_coordinator(self) -> bool:
        """Whether this proxy runs a coordinator."""
        return not self.coordinator or self.coordinator_listen is not None

    @property
    def is_one_process(self) -> bool:
        """Whether one process places the calls that it serves."""
        return self.workers == 1 and not self.coordinator and self.coordinator_listen is None


def workers_for(cores: int) -> int:
    """Return how many workers serve best: one takes a thousand short calls a second, and each more costs memory."""
    return min(_MOST_AUTO_WORKERS, max(1, cores // _CORES_PER_WORKER))


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use, at least 1: by its affinity, and by its container's `cpu.max`."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        return cores


def listen_address(value: str) -> tuple[str, int]:
    """Return host and port of `ADDRESS:PORT`. Raises ValueError."""
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != value:
        raise ValueError("coordinator_listen is not an address and a port: write it like 0.0.0.0:8009 or [::]:8009")
    return host, port
