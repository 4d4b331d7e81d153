"""Which trajectory a call belongs to, and which earlier answer it continues.

Order of evidence: an explicit id (path, header, body); an SDK's retry of an attempt that nobody answered; the
message graph: the deepest assistant message of the request that is an answer we gave. Without evidence a new
trajectory begins, so parallel runs of one prompt never merge.

Where equal answers were given twice, the tool-call ids decide, then the same API key, then the answer that nobody
has continued yet, then the latest. A run has one version and one purpose, live or eval (a version asked for by
name); nothing joins a run of the other kind. Nothing joins a run of another checked key either: a trajectory's name is
its key's own, and the same name under another key is another trajectory.

Memory is bounded: runs are forgotten after `idle_seconds`, the stillest first where there are
too many. A sequence is remembered as its length and hash, not as its ids.

All state belongs to the event loop's thread. No I/O; time is a parameter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from proxy.errors import BadRequest
from store import messages as canon
from store.ids import new_id
from store.owners import may_share
from store.records import OTHER, OpenLeaf

_MOST_LEAVES = 2_000  # of one run
_MOST_EQUAL = 256  # equal answers that are told apart
_MOST_ATTEMPTS = 10_000  # bodies that nobody got an answer to
_MOST_SAME = 64  # attempts with one body


@dataclass(slots=True, frozen=True)
class Sequence32:
    """A token sequence by length in bytes (int32 each) and hash: enough to say what begins with it."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, packed: bytes) -> Sequence32:
        """Return the fingerprint of packed ids."""
        return cls(len(packed), blake2b(packed, digest_size=16).digest())

    def begins(self, packed: bytes) -> bool:
        """Return whether `packed` begins with this sequence, id for id."""
        if not self.length or len(packed) < self.length:
            return False
        return blake2b(memoryview(packed)[: self.length], digest_size=16).digest() == self.digest


@dataclass(slots=True, eq=False)
class Leaf:
    """An answer that a coming request may continue."""

    trajectory_id: str
    call_id: str
    choice: int
    version: int
    link_key: str
    tool_call_ids: tuple[str, ...]
    key_id: str | None
    sequence: Sequence32
    born_at: float
    purpose: str = "live"
    extended: bool = False


@dataclass(slots=True)
class Run:
    """An open trajectory as the proxy knows it."""

    alias: str
    version: int
    last_active_at: float
    purpose: str = "live"
    key_id: str | None = None
    calls_under_way: int = 0
    leaves: deque[Leaf] = field(default_factory=deque)


@dataclass(slots=True, frozen=True)
class Evidence:
    """What a request says about where it belongs. `keys` are the link keys of its messages, in order."""

    alias: str
    version: int | None  # where the client asked for one by name
    messages: Sequence[dict[str, Any]]
    keys: tuple[str, ...]
    key_id: str | None
    explicit: str | None = None
    explicit_by: str = ""  # path, header, body, key
    retry: tuple[str | None, bytes] | None = None  # (key, body hash) where the SDK says that it tries again
    other: bool = False  # the model is not trained here

    @property
    def purpose(self) -> str:
        """`eval` where a version is asked for by name, `other` where the model is not trained here, else `live`."""
        if self.other:
            return OTHER
        return "live" if self.version is None else "eval"


@dataclass(slots=True, frozen=True)
class Link:
    """Where a call belongs. `version` is None where the trajectory is new and has none yet."""

    trajectory_id: str
    version: int | None
    linked_by: str
    parent: Leaf | None = None
    purpose: str = "live"
    key_id: str | None = None  # whose a new trajectory is


class Links:
    """The proxy's memory of open trajectories."""

    def __init__(self, idle_seconds: float, most_runs: int) -> None:
        self._idle = idle_seconds
        self._most = most_runs
        self._runs: OrderedDict[str, Run] = OrderedDict()  # the stillest first
        self._leaves: dict[str, list[Leaf]] = {}
        self._attempts: OrderedDict[tuple[str | None, bytes], deque[Link]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, asked: Evidence) -> Link:
        """Return where the request belongs. Raises BadRequest where id and version contradict each other."""
        if asked.explicit is not None:
            return self._named(asked, asked.explicit)
        if asked.retry and (earlier := self._earlier(asked.retry)):
            return earlier
        leaf, by = self._parent(asked, None)
        if leaf is not None:
            return Link(leaf.trajectory_id, leaf.version, by, leaf, leaf.purpose)
        return Link(new_id("traj"), None, "root", purpose=asked.purpose, key_id=asked.key_id)

    def _named(self, asked: Evidence, name: str) -> Link:
        """Return the run that the client names, whatever it is; only an explicit version can contradict it."""
        run = self._runs.get(name)
        if run is not None and not may_share(run.key_id, asked.key_id):
            name = f"{name}~{blake2b(str(asked.key_id).encode(), digest_size=4).hexdigest()}"
            run = self._runs.get(name)
        leaf, _ = self._parent(asked, name)
        if run is None:
            return Link(name, None, asked.explicit_by, leaf, asked.purpose, asked.key_id)
        if asked.version is not None:
            wanted = f"{asked.alias}@{asked.version}"
            remedy = "leave out the version, or the trajectory id"
            if (asked.alias, asked.version) != (run.alias, run.version):
                raise BadRequest(
                    f"trajectory {name} runs on {run.alias}@{run.version} and cannot continue on {wanted}: {remedy}"
                )
            if run.purpose != asked.purpose:
                raise BadRequest(f"trajectory {name} is no evaluation and cannot become one of {wanted}: {remedy}")
        return Link(name, run.version, asked.explicit_by, leaf, run.purpose)

    def _earlier(self, attempt: tuple[str | None, bytes]) -> Link | None:
        """Return an unanswered attempt with this key and body whose run is still remembered; each is given once."""
        waiting = self._attempts.pop(attempt, None)
        while waiting:
            link = waiting.popleft()
            run = self._runs.get(link.trajectory_id)
            if run is not None:
                if waiting:
                    self._attempts[attempt] = waiting
                return Link(link.trajectory_id, run.version, "retry", link.parent, run.purpose)
        return None

    def _parent(self, asked: Evidence, trajectory: str | None) -> tuple[Leaf | None, str]:
        """Return the answer that the request continues, and how it was found."""
        for place in range(len(asked.keys) - 1, -1, -1):
            if asked.messages[place].get("role") != "assistant":
                continue
            found = [leaf for leaf in self._leaves.get(asked.keys[place], ()) if self._fits(leaf, asked, trajectory)]
            if not found:
                continue
            ids = canon.tool_call_ids(asked.messages[place])
            same_ids = [leaf for leaf in found if leaf.tool_call_ids == ids] if ids else []
            best = max(same_ids or found, key=lambda leaf: _preference(leaf, asked.key_id))
            return best, "graph+tool_ids" if same_ids else "graph"
        return None, ""

    def _fits(self, leaf: Leaf, asked: Evidence, trajectory: str | None) -> bool:
        run = self._runs.get(leaf.trajectory_id)
        if run is None or run.alias != asked.alias or not may_share(leaf.key_id, asked.key_id):
            return False
        if trajectory is not None:
            return leaf.trajectory_id == trajectory
        if leaf.purpose != asked.purpose:
            return False  # an evaluation and an agent at work may say the same words; they are not one run
        return asked.version is None or asked.version == leaf.version

    def begin(self, link: Link, alias: str, version: int, now: float) -> None:
        """A call of this trajectory is under way on this version."""
        run = self._runs.get(link.trajectory_id)
        if run is None:
            run = self._runs[link.trajectory_id] = Run(alias, version, now, link.purpose, link.key_id)
            self._forget_still(now)
        run.calls_under_way += 1
        self._touch(link.trajectory_id, run, now)
        if link.parent is not None:
            link.parent.extended = True

    def end(self, link: Link, leaves: Iterable[Leaf], now: float) -> None:
        """A call of this trajectory is over; `leaves` are its answers."""
        run = self._runs.get(link.trajectory_id)
        if run is None:
            return
        run.calls_under_way = max(0, run.calls_under_way - 1)
        self._touch(link.trajectory_id, run, now)
        for leaf in leaves:
            self._add(run, leaf)

    def unanswered(self, link: Link, attempt: tuple[str | None, bytes]) -> None:
        """Nobody got an answer to this attempt; the client's SDK may try again with the same body."""
        self._attempts.setdefault(attempt, deque(maxlen=_MOST_SAME)).append(link)
        self._attempts.move_to_end(attempt)
        while len(self._attempts) > _MOST_ATTEMPTS:
            self._attempts.popitem(last=False)

    def restore(self, leaves: Iterable[OpenLeaf], now: float) -> None:
        """Take up the answers that the store knows of, oldest first."""
        for known in leaves:
            run = self._runs.get(known.trajectory_id)
            if run is None:
                run = Run(known.alias, known.version, known.last_active_at, known.purpose, known.key_id)
                self._runs[known.trajectory_id] = run
            self._add(
                run,
                Leaf(
                    trajectory_id=known.trajectory_id,
                    call_id=known.call_id,
                    choice=known.choice,
                    version=known.version,
                    link_key=known.link_key,
                    tool_call_ids=known.tool_call_ids,
                    key_id=known.key_id,
                    sequence=Sequence32.of(known.sequence),
                    born_at=known.last_active_at,
                    purpose=known.purpose,
                ),
            )
        self._runs = OrderedDict(sorted(self._runs.items(), key=lambda item: item[1].last_active_at))
        self._forget_still(now)

    def forget(self, trajectory_id: str) -> None:
        """Forget a trajectory: it is complete, and what comes next begins another one."""
        run = self._runs.pop(trajectory_id, None)
        for leaf in run.leaves if run else ():
            self._drop(leaf)

    def pins(self, now: float, idle_seconds: float) -> dict[str, int]:
        """Return how many trajectories hold each `alias@version`: active within `idle_seconds`, or under way."""
        held: Counter[str] = Counter()
        for run in self._runs.values():
            if run.calls_under_way or now - run.last_active_at < idle_seconds:
                held[f"{run.alias}@{run.version}"] += 1
        return dict(held)

    def _touch(self, trajectory_id: str, run: Run, now: float) -> None:
        run.last_active_at = now
        self._runs.move_to_end(trajectory_id)

    def _add(self, run: Run, leaf: Leaf) -> None:
        same = self._leaves.setdefault(leaf.link_key, [])
        same.append(leaf)
        if len(same) > _MOST_EQUAL:
            same.pop(0)
        run.leaves.append(leaf)
        if len(run.leaves) > _MOST_LEAVES:
            self._drop(run.leaves.popleft())

    def _drop(self, leaf: Leaf) -> None:
        same = self._leaves.get(leaf.link_key, [])
        if leaf in same:
            same.remove(leaf)
        if not same:
            self._leaves.pop(leaf.link_key, None)

    def _forget_still(self, now: float) -> None:
        """Forget what has been still for too long, and the stillest where there are too many."""
        for trajectory_id, run in list(self._first(2)):
            if run.calls_under_way:
                self._runs.move_to_end(trajectory_id)
            elif now - run.last_active_at > self._idle or len(self._runs) > self._most:
                self.forget(trajectory_id)

    def _first(self, count: int) -> Iterable[tuple[str, Run]]:
        for item, _ in zip(self._runs.items(), range(count), strict=False):
            yield item


def _preference(leaf: Leaf, key_id: str | None) -> tuple[bool, bool, float]:
    return leaf.key_id == key_id, not leaf.extended, leaf.born_at
