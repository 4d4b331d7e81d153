"""Ports: is one free, which process listens on it, which is the next free one.

Another program may take a free port before the service binds it; the service then fails with its own message.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

from ratchet.errors import CliError

_TRIES = 200


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that listens on a port."""

    pid: int
    command: str


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on `host:port` now, and no other one is about to.

    vLLM binds its port when it starts and listens minutes later; another server that listens there meanwhile makes it
    wait for ever. Such a port can be bound with SO_REUSEADDR only, as one whose last connections are in TIME_WAIT,
    which counts as free.
    """
    return _can_listen(host, port, reuse=True) and (_can_listen(host, port, reuse=False) or _has_connections(port))


def _can_listen(host: str, port: int, *, reuse: bool) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _has_connections(port: int) -> bool:
    """Return whether connections of this port are known to the system, also closed ones in TIME_WAIT."""
    try:
        return any(tuple(one.laddr)[1:2] == (port,) for one in psutil.net_connections(kind="tcp"))
    except psutil.Error:
        return True


def port_holder(port: int) -> Holder | None:
    """Return the process that listens on a port; None if there is none or it is not visible."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.pid and tuple(connection.laddr)[1:2] == (port,):
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "a process of another user"
            return Holder(connection.pid, command)
    return None


def choose_port(name: str, setting: str, host: str, port: int, *, fixed: bool, taken: set[int]) -> int:
    """Return the port for a service: `port` if it is free, else the next free one unless the user set it.

    0 takes any free port. `taken` are ports that other services of this project will use. Raises CliError, naming
    the process on the port.
    """
    if port == 0:
        return _any_free(host, taken)
    if port not in taken and is_free(host, port):
        return port
    if fixed:
        owner = port_holder(port)
        reason = f"used by pid {owner.pid} ({owner.command[:200]})" if owner else "used by a process of another user"
        if port in taken:
            reason = "used by another service of this project"
        raise CliError(f"{name}: port {port} is {reason}; stop it, or set {setting} to a free port")
    for candidate in range(port + 1, port + _TRIES):
        if candidate not in taken and is_free(host, candidate):
            return candidate
    raise CliError(f"{name}: no free port from {port} to {port + _TRIES - 1}; set {setting} to a free port")


def _any_free(host: str, taken: set[int]) -> int:
    """Return a free port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
