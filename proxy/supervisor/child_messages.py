"""The messages between the supervisor and its processes, pickled in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.proxy.roles import Role
from ratchet.proxy.settings import ProxySettings


@dataclass(frozen=True)
class Start:
    """The first message to a child. `listeners` are file descriptors; `url` is where agents reach the proxy."""

    settings: ProxySettings
    role: Role
    listeners: Sequence[int]
    url: str


@dataclass(frozen=True)
class SetAgents:
    """Serve these agents from now on."""

    names: Sequence[str]


@dataclass(frozen=True)
class WorkerDied:
    """A worker died; to the coordinator."""

    name: str


@dataclass(frozen=True)
class Listening:
    """The child serves."""


@dataclass(frozen=True)
class StartFailed:
    """The child could not start."""

    reason: str
