"""Open trajectories: their records, their names, and how many of them pin each policy version.

All state belongs to the event loop's thread; time is a parameter.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from ratchet.proxy.messages.link_records import Leaf

_SECRET = secrets.token_bytes(16)
_MAX_NAME_LENGTH = 128  # characters of a trajectory's id in the store
_MAX_SUFFIX = 64
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:@+=-]")


class OpenTrajectory(msgspec.Struct):
    """An open trajectory as the proxy knows it. Its alias never changes; `move` changes its version."""

    alias: str
    version: int
    last_active_at: float
    purpose: str = "live"
    key_id: str | None = None
    family: str | None = None  # of its task; None until it is first needed
    open_calls: int = 0
    leaves: list[Leaf] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.alias, self.purpose = sys.intern(self.alias), sys.intern(self.purpose)  # of many trajectories
        if self.key_id is not None:
            self.key_id = sys.intern(self.key_id)

    def add(self, leaf: Leaf) -> None:
        """Add an answer. It shares the trajectory's values: a decoded one has equal ones of its own."""
        if self.leaves:
            leaf.trajectory_id = self.leaves[-1].trajectory_id
        if leaf.key_id == self.key_id:
            leaf.key_id = self.key_id
        if leaf.version == self.version:
            leaf.version = self.version
        leaf.purpose = sys.intern(leaf.purpose)
        self.leaves.append(leaf)


def candidate_names(name: str, key_id: str | None, alias: str) -> Iterator[str]:
    """Yield the trajectory ids that a key's agent may use for a name of its choice, in the order of the attempts.

    The first is the name itself. If a trajectory of another key or agent has it, the second is `NAME~HASH` with a hash
    of the key's id and the agent, the same after a restart. A client that knows this id could take that name too. The
    third depends on a secret of this process: nobody can predict it, and it changes with a restart.
    """
    key = f"{key_id}\0{alias}".encode()
    yield name
    yield _with_suffix(name, blake2b(key, digest_size=4).hexdigest())
    yield _with_suffix(name, blake2b(key, digest_size=8, key=_SECRET).hexdigest())


def name_of_other_agent(name: str, alias: str) -> str:
    """Return the trajectory id of another agent within the trajectory `name`: a trajectory has one agent."""
    return _with_suffix(name, _NOT_IN_ID.sub("_", alias)[:_MAX_SUFFIX])


def _with_suffix(name: str, suffix: str) -> str:
    whole = f"{name}~{suffix}"
    if len(whole) <= _MAX_NAME_LENGTH:
        return whole
    return f"{blake2b(name.encode(), digest_size=16).hexdigest()}~{suffix}"


class VersionPins:
    """The trajectories that pin their version: those with an open call, and those active a short while ago.

    The counts are maintained, not computed: a call costs a few steps, and `counts` only visits the trajectories that
    became idle since its last call. It never blocks the event loop for long, however many trajectories are open.
    """

    def __init__(self) -> None:
        self._pinning: OrderedDict[str, OpenTrajectory] = OrderedDict()  # least recently active first
        self._counts: Counter[str] = Counter()

    def touch(self, trajectory_id: str, trajectory: OpenTrajectory) -> None:
        """Record that a trajectory is active now."""
        if trajectory_id not in self._pinning:
            self._pinning[trajectory_id] = trajectory
            self._counts[_policy(trajectory)] += 1
        self._pinning.move_to_end(trajectory_id)

    def remove(self, trajectory_id: str) -> None:
        """Remove a trajectory's pin."""
        trajectory = self._pinning.pop(trajectory_id, None)
        if trajectory is not None:
            self._counts[_policy(trajectory)] -= 1

    def counts(self, now: float, idle_seconds: float) -> dict[str, int]:
        """Return the number of pins by `alias@version`: trajectories with a call within `idle_seconds` or open now."""
        for trajectory_id, trajectory in self._idle_since(now - idle_seconds):
            if trajectory.open_calls:
                self._pinning.move_to_end(trajectory_id)
            else:
                self.remove(trajectory_id)
        return {policy: count for policy, count in self._counts.items() if count}

    def _idle_since(self, before: float) -> list[tuple[str, OpenTrajectory]]:
        idle = []
        for trajectory_id, trajectory in self._pinning.items():
            if trajectory.last_active_at > before:
                break
            idle.append((trajectory_id, trajectory))
        return idle


def _policy(trajectory: OpenTrajectory) -> str:
    return f"{trajectory.alias}@{trajectory.version}"
