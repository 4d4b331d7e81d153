"""Free ports for servers whose port is chosen before they start."""

from __future__ import annotations

import contextlib
import random
import socket

_BELOW_CLIENTS = (10_000, 30_000)  # the system takes the ports of outgoing connections from above


def free_port() -> int:
    """Return a free port; parallel tests rarely get the same one."""
    while True:
        port = random.SystemRandom().randint(*_BELOW_CLIENTS)  # tests may seed the module
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
