"""Two machines on one host: this host and a network namespace, which a virtual cable joins.

Their programs reach each other by address only, as on two machines: localhost of one is not localhost of the other.
Needs root; where that is missing, both machines are this host. As a program it is one process of a learner, which
compares itself with the others and ends; the launcher's variables say which it is.

    python -m tests.harness.trainer.two_machines VERSION WEIGHTS
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ratchet.trainer.errors import LearnerServiceError
from ratchet.trainer.learner_service.process import LearnerProcessIdentity, compare_processes


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: its address, what precedes a command that runs on it, and variables for its programs."""

    address: str
    prefix: tuple[str, ...]
    environment: dict[str, str]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines; they are gone at the end."""
    name = secrets.token_hex(4)
    if not _can_isolate(name):
        machine = Machine("127.0.0.1", (), {})
        yield machine, machine
        return
    ours, theirs, network = f"o{name}", f"t{name}", f"10.231.{secrets.randbelow(256)}"
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
        _ip("link", "set", theirs, "netns", name)
        _ip("address", "add", f"{network}.1/24", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "address", "add", f"{network}.2/24", "dev", theirs)
        for link in (theirs, "lo"):
            _ip("-n", name, "link", "set", link, "up")
        yield (
            Machine(f"{network}.1", (), {"GLOO_SOCKET_IFNAME": ours}),
            Machine(f"{network}.2", ("ip", "netns", "exec", name), {"GLOO_SOCKET_IFNAME": theirs}),
        )
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)  # with both ends of the cable


def _can_isolate(name: str) -> bool:
    if os.getuid() != 0:
        return False
    try:
        return subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def main(version: str, weights: str) -> int:
    """Return 0 if all processes are alike, 1 if not."""
    machine = os.environ["MACHINE"]
    try:
        compare_processes(LearnerProcessIdentity(machine, version, "base", {"weights": weights}), os.environ)
    except LearnerServiceError as refusal:
        print(f"{machine} refused: {refusal}", flush=True)
        return 1
    print(f"{machine} is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
