"""Ports for servers that are told theirs before they start."""

from __future__ import annotations

import contextlib
import random
import socket

_BELOW_CLIENTS = (10_000, 30_000)  # the system takes the ports of outgoing connections from above


def free_port() -> int:
    """Return a port that was free a moment ago; tests that run side by side hardly ever get the same."""
    while True:
        port = random.SystemRandom().randint(*_BELOW_CLIENTS)  # tests may seed the module
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
