"""Which trajectory a call belongs to, and which earlier answer it continues.

Order of evidence: an explicit id (path, header, body, key, previous response); an attempt that nobody answered, tried
again; the message graph: the deepest assistant message of the request that is an answer we gave, by its path; answers
and tool-call ids of ours under a path that has changed; quoted words of ours, which begin a segment. Without evidence
a new trajectory begins, so parallel runs of one prompt never merge. `docs/linking.md` has the rules and how they do.

Where equal answers were given twice, the tool-call ids decide, then the call none of whose answers was continued yet,
then the answer that nobody has continued yet, then the latest. A run has one key, one version and one purpose, live or
eval (a version asked for by name); unless it is named, nothing of another kind joins it. Nothing joins a run of another
checked key either way: a trajectory's name is its key's own, and the same name under another key is another trajectory.

Memory is bounded in bytes, in all and per key (`proxy/runtime/byte_quotas.py`): runs are forgotten after
`idle_seconds`, and where
they take too much the stillest of who holds most first. A sequence is remembered as its length and hash.

All state belongs to the event loop's thread. No I/O; time is a parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from ratchet.proxy.coordinator.linking import fuzzy_match, quote_match
from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.coordinator.linking.leaf_sizes import TRAJECTORY_BYTES, size_of
from ratchet.proxy.coordinator.linking.stored_leaves import attempt_from_store, leaf_from_store
from ratchet.proxy.coordinator.linking.trajectory_names import names
from ratchet.proxy.coordinator.linking.unanswered_attempts import RESEND_WINDOW, RETRY_WINDOW, UnansweredAttempts
from ratchet.proxy.coordinator.linking.version_pins import VersionPins
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.messages.link_records import AttemptKey, Evidence, Leaf, Link, TokenFingerprint
from ratchet.proxy.runtime.byte_quotas import ByteQuotas
from ratchet.store.access.ownership import may_share_trajectory, owner
from ratchet.store.content import messages as canon
from ratchet.store.ids import new_id
from ratchet.store.records import CallBegun, OpenLeaf, UnansweredCall, family_of

_MOST_LEAVES = 2_000  # of one run
_PASSED_OVER = 64  # runs with a call under way, at once
_ATTEMPTS = 16  # the part of the bytes that unanswered attempts may take
_NONE = LeafIndex()
_EXPLICIT = ("path", "header", "body", "key", "previous_response")


class Run(msgspec.Struct):
    """An open trajectory as the proxy knows it."""

    alias: str
    version: int
    last_active_at: float
    purpose: str = "live"
    key_id: str | None = None
    family: str | None = None  # of its task, once somebody asked
    open_calls: int = 0
    leaves: list[Leaf] = msgspec.field(default_factory=list)


class TrajectoryLinker:
    """The proxy's memory of open trajectories."""

    def __init__(self, idle_seconds: float, max_bytes: int = 2**28, max_bytes_per_key: int = 2**27) -> None:
        self._idle = idle_seconds
        self._runs: OrderedDict[str, Run] = OrderedDict()  # the stillest first
        self._leaves: dict[tuple[str, str], LeafIndex] = {}  # by alias and whose they are
        self._quotas: ByteQuotas[str] = ByteQuotas(max_bytes, max_bytes_per_key)
        self._attempts = UnansweredAttempts(max_bytes // _ATTEMPTS, max_bytes_per_key // _ATTEMPTS)
        self._pins = VersionPins()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def bytes(self) -> int:
        """What all that is remembered takes, as an estimate."""
        return self._quotas.bytes + self._attempts.bytes

    def find_link(self, asked: Evidence) -> Link:
        """Return where the request belongs. Raises BadRequest where id and version contradict each other."""
        if asked.explicit is not None:
            return self._named(asked, asked.explicit)
        if asked.attempt and (earlier := self._earlier(asked, asked.attempt)):
            return earlier
        leaf, by = self._parent(asked, None)
        if leaf is not None:
            by = "retry" if asked.is_retry and leaf.is_extended else by
            return Link(leaf.trajectory_id, leaf.version, by, leaf, leaf.purpose)
        said, goes_on, by = quote_match.quoted(
            self._of(asked), asked.messages, asked.keys, lambda leaf: self._fits(leaf, asked, None)
        )
        if said is not None:
            parent = said if goes_on else None
            return Link(said.trajectory_id, said.version, by, parent, said.purpose, quoted=said)
        return Link(new_id("traj"), None, "root", purpose=asked.purpose, key_id=asked.key_id)

    def _named(self, asked: Evidence, name: str) -> Link:
        """Return the run that the client names, whatever it is; only an explicit version can contradict it."""
        for own in names(name, asked.key_id):
            name, run = own, self._runs.get(own)
            if run is None or may_share_trajectory(run.key_id, asked.key_id):
                break
        leaf = self._followed(asked.follows, name, run) if asked.follows else self._parent(asked, name)[0]
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

    def _followed(self, call_id: str, name: str, run: Run | None) -> Leaf:
        """Return the answer of the call that the client says it continues, also where its tokens are forgotten."""
        known = (leaf for leaf in reversed(run.leaves if run else ()) if leaf.call_id == call_id)
        return next(known, None) or Leaf(name, call_id, 0, 0, "", (), None, TokenFingerprint(0, b""), 0.0)

    def _earlier(self, asked: Evidence, attempt: AttemptKey) -> Link | None:
        """Return an unanswered attempt at the same whose run is still remembered; each is given once."""
        since = asked.arrived_at - (RETRY_WINDOW if asked.is_retry else RESEND_WINDOW)
        while link := self._attempts.take(attempt, since):
            run = self._runs.get(link.trajectory_id)
            same = run is not None and (run.alias, run.purpose) == (asked.alias, asked.purpose)
            if run is not None and same and asked.version in (None, run.version):
                by = "retry" if asked.is_retry else "resend"
                return Link(link.trajectory_id, run.version, by, link.parent, run.purpose)
        return None

    def _parent(self, asked: Evidence, trajectory: str | None) -> tuple[Leaf | None, str]:
        """Return the answer that the request continues, and how it was found."""
        deepest, leaves = None, self._of(asked)
        for place in range(len(asked.keys) - 1, -1, -1):
            if asked.messages[place].get("role") != "assistant":
                continue
            deepest = place if deepest is None else deepest
            found = [leaf for leaf in leaves.at(asked.keys[place]) if self._fits(leaf, asked, trajectory)]
            if found:
                later = self._later(asked, found, place) if place != deepest else (None, "")
                return later if later[0] else _best(asked, place, found)
        if deepest is None:
            return None, ""
        return fuzzy_match.continued(leaves, asked.messages, lambda leaf: self._fits(leaf, asked, trajectory))

    def _later(self, asked: Evidence, found: Sequence[Leaf], place: int) -> tuple[Leaf | None, str]:
        """Return an answer of the same runs that stands after `place`, where the path has changed."""
        runs = {leaf.trajectory_id for leaf in found}
        after = asked.messages[place + 1 :]
        return fuzzy_match.continued(self._of(asked), after, lambda leaf: leaf.trajectory_id in runs, sure=True)

    def _of(self, asked: Evidence) -> LeafIndex:
        return self._leaves.get((asked.alias, owner(asked.key_id)), _NONE)

    def _fits(self, leaf: Leaf, asked: Evidence, trajectory: str | None) -> bool:
        run = self._runs.get(leaf.trajectory_id)
        if run is None or run.alias != asked.alias or not may_share_trajectory(leaf.key_id, asked.key_id):
            return False
        if trajectory is not None:
            return leaf.trajectory_id == trajectory
        if leaf.purpose != asked.purpose or leaf.key_id != asked.key_id:
            return False  # an evaluation and an agent at work may say the same words; they are not one run
        return asked.version is None or asked.version == leaf.version

    def begin_call(self, link: Link, alias: str, version: int, now: float) -> None:
        """A call of this trajectory is under way on this version."""
        run, size = self._runs.get(link.trajectory_id), 0
        if run is None:
            run = self._runs[link.trajectory_id] = Run(alias, version, now, link.purpose, link.key_id)
            size = TRAJECTORY_BYTES
            self._forget_idle(now)
        run.open_calls += 1
        self._touch(link.trajectory_id, run, now, size)
        if link.parent is not None:
            self._extend(link.parent)
        if link.quoted is not None:
            link.quoted.is_quoted = True

    def _extend(self, leaf: Leaf) -> None:
        """An answer is continued: of its call, whose answers stand together in the run, all are taken."""
        leaf.is_extended = leaf.is_taken = True
        run = self._runs.get(leaf.trajectory_id)
        for other in reversed(run.leaves if run else ()):
            if other.call_id == leaf.call_id:
                other.is_taken = True
            elif other.created_at < leaf.created_at:
                return

    def task_family(self, begun: CallBegun) -> str:
        """Return the task family of a call's trajectory: that of its first call, whatever later ones say."""
        run = self._runs.get(begun.trajectory_id)
        found = run.family if run else None
        if found is None:
            found = family_of(begun.task, begun.tools_hash)
            if run is not None:
                run.family = found
        return found

    def end_call(self, link: Link, leaves: Iterable[Leaf], now: float) -> None:
        """A call of this trajectory is over; `leaves` are its answers."""
        run = self._runs.get(link.trajectory_id)
        if run is None:
            return
        run.open_calls = max(0, run.open_calls - 1)
        size = sum([self._add(run, leaf) for leaf in leaves])
        self._touch(link.trajectory_id, run, now, size)
        self._forget_excess(run.key_id)

    def add_unanswered(self, link: Link, attempt: AttemptKey, now: float) -> None:
        """Nobody got an answer to this attempt; its client may try again. A run that is named will be named again."""
        if link.linked_by not in _EXPLICIT:
            self._attempts.add(attempt, link, now)

    def restore_from_store(
        self, leaves: Iterable[OpenLeaf], now: float, attempts: Iterable[UnansweredCall] = ()
    ) -> None:
        """Take up the answers and the unanswered attempts that the store knows of, oldest first."""
        known: dict[tuple[str | None, int], Leaf] = {}
        for one in leaves:
            leaf = known[one.call_id, one.choice] = leaf_from_store(one)
            run = self._restored(one, leaf.key_id)
            self._quotas.add_use(run.key_id, one.trajectory_id, self._add(run, leaf))
        for leaf in known.values():
            if leaf.is_extended:
                self._extend(leaf)
        for lost in attempts:
            self._restored(lost, lost.key_id)
            parent = known.get((lost.parent_call, lost.parent_choice))
            self._attempts.add(*attempt_from_store(lost, parent))
        self._runs = OrderedDict(sorted(self._runs.items(), key=lambda item: item[1].last_active_at))
        for trajectory_id, run in self._runs.items():
            self._pins.touch(trajectory_id, run)
            self._quotas.add_use(run.key_id, trajectory_id)
        for key_id in {run.key_id for run in self._runs.values()}:
            self._forget_excess(key_id)
        self._forget_idle(now)

    def _restored(self, known: OpenLeaf | UnansweredCall, key_id: str | None) -> Run:
        run = self._runs.get(known.trajectory_id)
        if run is None:
            run = Run(known.alias, known.version, known.last_active_at, known.purpose, key_id, known.family)
            self._runs[known.trajectory_id] = run
            self._quotas.add_use(key_id, known.trajectory_id, TRAJECTORY_BYTES)
        return run

    def forget_trajectory(self, trajectory_id: str) -> None:
        """Forget a trajectory: it is complete, and what comes next begins another one."""
        run = self._runs.pop(trajectory_id, None)
        self._pins.forget(trajectory_id)
        if run is not None:
            for leaf in run.leaves:
                self._drop(run, leaf)
            size = TRAJECTORY_BYTES + sum(map(size_of, run.leaves))
            self._quotas.remove(run.key_id, trajectory_id, size)

    def count_pins(self, now: float, idle_seconds: float) -> dict[str, int]:
        """Return how many trajectories hold each `alias@version`: active within `idle_seconds`, or under way."""
        return self._pins.counts(now, idle_seconds)

    def _touch(self, trajectory_id: str, run: Run, now: float, size: int) -> None:
        run.last_active_at = now
        self._runs.move_to_end(trajectory_id)
        self._quotas.add_use(run.key_id, trajectory_id, size)
        self._pins.touch(trajectory_id, run)

    def _add(self, run: Run, leaf: Leaf) -> int:
        """Remember an answer; return how many bytes the run takes more."""
        scope = run.alias, owner(leaf.key_id)
        known = self._leaves.get(scope)
        if known is None:
            known = self._leaves[scope] = LeafIndex()
        known.add(leaf)
        run.leaves.append(leaf)
        if len(run.leaves) <= _MOST_LEAVES:
            return size_of(leaf)
        first = run.leaves.pop(0)
        self._drop(run, first)
        return size_of(leaf) - size_of(first)

    def _drop(self, run: Run, leaf: Leaf) -> None:
        scope = run.alias, owner(leaf.key_id)
        self._leaves[scope].drop(leaf)
        if not self._leaves[scope]:
            del self._leaves[scope]

    def _forget_idle(self, now: float) -> None:
        """Forget what has been still for too long."""
        for _ in range(min(2, len(self._runs))):
            trajectory_id, run = next(iter(self._runs.items()))
            if run.open_calls:
                self._runs.move_to_end(trajectory_id)
            elif now - run.last_active_at > self._idle:
                self.forget_trajectory(trajectory_id)
            else:
                return

    def _forget_excess(self, key_id: str | None) -> None:
        """Forget the stillest runs of who holds too much; those with a call under way are passed over."""
        passed = 0
        while passed < _PASSED_OVER and (trajectory_id := self._quotas.next_to_evict(key_id)) is not None:
            run = self._runs[trajectory_id]
            if run.open_calls:
                self._quotas.add_use(run.key_id, trajectory_id)
                passed += 1
            else:
                self.forget_trajectory(trajectory_id)


def _best(asked: Evidence, place: int, found: Sequence[Leaf]) -> tuple[Leaf, str]:
    """Return the leaf that is meant among those of one path, and how it was told from the others."""
    exact = [leaf for leaf in found if leaf.link_key == asked.keys[place]]
    ids = canon.tool_call_ids(asked.messages[place])
    same_ids = [leaf for leaf in found if leaf.tool_call_ids == ids] if ids else []
    best = max(same_ids or exact or found, key=fuzzy_match.preference)
    by = "graph" if best.link_key == asked.keys[place] else "graph+gap"
    return best, "graph+tool_ids" if same_ids and by == "graph" else by
