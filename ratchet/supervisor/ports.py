"""Ports: is one free, who holds it, which is the next free one.

A free port can be taken by another program between the look and its use: the room that then fails to bind says so.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

from ratchet.errors import PortInUse

_TRIES = 200


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that listens on a port."""

    pid: int
    command: str


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on `host:port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are only fading away counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def holder(port: int) -> Holder | None:
    """Return who listens on a port; None where nobody does or the system does not tell."""
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


def choose(name: str, setting: str, host: str, port: int, *, fixed: bool, taken: set[int]) -> int:
    """Return the port for a room: `port` if it is free, else the next free one unless the user fixed it.

    0 takes any free port. `taken` are ports that other rooms of this project are about to use. Raises PortInUse, naming
    the holder.
    """
    if port == 0:
        return _any_free(host, taken)
    if port not in taken and is_free(host, port):
        return port
    if fixed:
        who = holder(port)
        by = f"held by pid {who.pid} ({who.command[:200]})" if who else "held by a process that this user cannot see"
        if port in taken:
            by = "given to another room of this project"
        raise PortInUse(f"{name}: port {port} is {by}; stop it, or set {setting} to a free port")
    for candidate in range(port + 1, port + _TRIES):
        if candidate not in taken and is_free(host, candidate):
            return candidate
    raise PortInUse(f"{name}: no free port from {port} to {port + _TRIES - 1}; set {setting} to a free port")


def _any_free(host: str, taken: set[int]) -> int:
    """Return a port that the system calls free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
