"""Free ports for servers whose port is chosen before they start."""

from __future__ import annotations

import contextlib
import random
import socket

_BELOW_CLIENTS = (10_000, 30_000)  # the system takes the ports of outgoing connections from above
_GIVEN: set[int] = set()  # a project's two services never get one port


def free_port() -> int:
    """Return a free port: another one at each call, which parallel tests rarely get as well."""
    while True:
        port = random.SystemRandom().randint(*_BELOW_CLIENTS)  # tests may seed the module
        if port in _GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _GIVEN.add(port)
            return port
