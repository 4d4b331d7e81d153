"""Two machines and a database, each in a network namespace of its own, whose links can be cut.

Every pair is joined by a bridge in the namespace of the caller. A cut takes one end off the bridge: packets are lost
without a word, as in a real partition. The caller reaches each machine by a link that is never cut. Needs root; without
it, all run on the loopback address, and nothing can be cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations

DATABASE = "db"
MACHINES = ("m1", "m2")
_NODES = (*MACHINES, DATABASE)


class Network:
    """The addresses of the nodes, and the links between them."""

    def __init__(self, name: str, octet: int) -> None:
        self._name = name  # of at most 6 characters: interfaces have 15
        self._octet = octet

    @property
    def has_links(self) -> bool:
        """Whether links can be cut."""
        return bool(self._name)

    def prefix(self, node: str) -> list[str]:
        """The beginning of a command that runs at a node."""
        return ["ip", "netns", "exec", f"{self._name}-{node}"] if self._name else []

    def address(self, node: str, seen_from: str | None = None) -> str:
        """The address of a node on its link to another one; to the caller if that is not given."""
        if not self._name:
            return "127.0.0.1"
        own = _NODES.index(node) + 1
        if seen_from is None:
            return f"10.{self._octet}.{own}.2"
        other = _NODES.index(seen_from) + 1
        low, high = sorted((own, other))
        return f"10.{self._octet}.{low * 10 + high}.{own}"

    def cut(self, one: str, other: str) -> None:
        """Lose every packet between two nodes."""
        _ip("link", "set", self._port(one, other), "nomaster")

    def heal(self, one: str, other: str) -> None:
        """End a cut."""
        _ip("link", "set", self._port(one, other), "master", self._bridge(one, other))

    def create(self) -> None:
        """Set the network up. Raises OSError or CalledProcessError where that is not allowed."""
        for node in _NODES:
            _ip("netns", "add", f"{self._name}-{node}")
            _ip("-n", f"{self._name}-{node}", "link", "set", "lo", "up")
        for node in MACHINES:
            outside = f"{self._name}{node}"
            self._join(node, outside, self.address(node))
            _ip("address", "add", f"{self.address(node).removesuffix('2')}1/24", "dev", outside)
        for one, other in combinations(_NODES, 2):
            _ip("link", "add", self._bridge(one, other), "type", "bridge")
            _ip("link", "set", self._bridge(one, other), "up")
            for node, far in ((one, other), (other, one)):
                self._join(node, self._port(node, far), self.address(node, far))
                self.heal(node, far)

    def remove(self) -> None:
        """Remove what there is of it."""
        for one, other in combinations(_NODES, 2):
            _ip("link", "delete", self._bridge(one, other), check=False)
        for node in _NODES:
            _ip("netns", "delete", f"{self._name}-{node}", check=False)

    def _join(self, node: str, outside: str, address: str) -> None:
        """Give a node an interface whose other end is `outside`."""
        space = f"{self._name}-{node}"
        _ip("link", "add", outside, "type", "veth", "peer", "name", outside, "netns", space)
        _ip("link", "set", outside, "up")
        _ip("-n", space, "address", "add", f"{address}/24", "dev", outside)
        _ip("-n", space, "link", "set", outside, "up")

    def _bridge(self, one: str, other: str) -> str:
        return self._name + "".join(sorted((one, other)))

    def _port(self, node: str, far: str) -> str:
        return f"{self._name}{node}{far}p"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Provide the namespaces, or the loopback address where they cannot be had."""
    made = Network(f"r{os.getpid() % 100_000}", 64 + os.getpid() % 128)
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield Network("", 0)
        return
    try:
        try:
            made.create()
        except (OSError, subprocess.CalledProcessError):
            made.remove()
            made = Network("", 0)
        yield made
    finally:
        if made.has_links:
            made.remove()


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)
