"""Which trajectory a call belongs to, and which earlier answer it continues.

Evidence, strongest first:

1. An explicit id: path, header, body, API key suffix, or previous response.
2. A retry of an attempt that got no answer.
3. The message graph: the deepest assistant message of the request that is a known answer at its path.
4. Known answers and tool-call ids under a changed path.
5. Quotes of known answers, which start a new segment.

Without evidence a new trajectory starts, so concurrent trajectories with the same prompt never merge. `docs/linking.md`
has the rules and measures them.

Equal answers are distinguished by their tool-call ids, then by calls without a continued answer, then by answers that
are not continued, then by age, latest first. A trajectory has one key, one version and one purpose, unless `move` moves
it; other calls join it only by its explicit id. Calls of another key never join: the same name under another key is
another trajectory.

Memory is bounded in bytes, in total and per key (`proxy/runtime/byte_quotas.py`). Trajectories are removed after
`idle_seconds`; above a limit, the key with the most bytes loses its least recently active ones. A token sequence is
stored as its length and hash.

All state belongs to the event loop's thread. No I/O; time is a parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby

import msgspec

from ratchet.proxy.coordinator.linking import fuzzy_match, quote_match, stopped_answers
from ratchet.proxy.coordinator.linking.leaf_index import TRAJECTORY_BYTES, LeafIndex
from ratchet.proxy.coordinator.linking.open_trajectories import (
    OpenTrajectory,
    VersionPins,
    candidate_names,
    name_of_other_agent,
)
from ratchet.proxy.coordinator.linking.restore import attempt_from_store
from ratchet.proxy.coordinator.linking.unanswered_attempts import RESEND_WINDOW, RETRY_WINDOW, UnansweredAttempts
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, LinkEvidence, Placement
from ratchet.proxy.runtime.byte_quotas import ByteQuotas
from ratchet.store.ids import may_share_trajectory, new_id, owner
from ratchet.store.records import MOVED, UNLINKED, OpenLeaf, UnansweredCall, family_of

_MAX_LEAVES = 2_000  # of one trajectory
_MAX_SKIPPED = 64  # trajectories with an open call that one eviction passes over
_ATTEMPTS_SHARE = 16  # unanswered attempts may use one 16th of the bytes
_EMPTY = LeafIndex()
_EXPLICIT = ("path", "header", "body", "key", "previous_response")


class MessagesNeeded(Exception):
    """Partial evidence does not decide the place of a call: all of its messages are needed."""


class TrajectoryLinker:
    """Links calls to the open trajectories of this proxy."""

    def __init__(self, idle_seconds: float, max_bytes: int = 2**28, max_bytes_per_key: int = 2**27) -> None:
        self._idle = idle_seconds
        self._trajectories: OrderedDict[str, OpenTrajectory] = OrderedDict()  # least recently active first
        self._leaves: dict[tuple[str, str], LeafIndex] = {}  # by alias and owner
        self._quotas: ByteQuotas[str] = ByteQuotas(max_bytes, max_bytes_per_key)
        self._attempts = UnansweredAttempts(max_bytes // _ATTEMPTS_SHARE, max_bytes_per_key // _ATTEMPTS_SHARE)
        self._pins = VersionPins()

    def __len__(self) -> int:
        return len(self._trajectories)

    @property
    def bytes(self) -> int:
        """The estimated memory use."""
        return self._quotas.bytes + self._attempts.bytes

    def find_link(self, evidence: LinkEvidence) -> Link:
        """Return a request's place.

        Raises BadRequest if its trajectory id and its version contradict each other, and MessagesNeeded if partial
        evidence is not enough. Then nothing has changed.
        """
        if evidence.explicit is not None:
            return self._link_named_trajectory(evidence, evidence.explicit)
        if evidence.attempt and (earlier := self._find_unanswered_attempt(evidence, evidence.attempt)):
            return earlier
        leaf, by = self._find_parent(evidence, None)
        if leaf is not None:
            by = "retry" if evidence.is_retry and leaf.is_extended else by
            return Link(leaf.trajectory_id, leaf.version, by, leaf, leaf.purpose)
        quoted, continues, by = quote_match.find_quoted_leaf(
            self._leaves_of(evidence),
            evidence.messages,
            evidence.keys,
            lambda leaf: self._may_continue(leaf, evidence, None),
        )
        if quoted is not None:
            parent = quoted if continues else None
            return Link(quoted.trajectory_id, quoted.version, by, parent, quoted.purpose, quoted=quoted)
        return Link(new_id("traj"), None, "root", purpose=evidence.purpose, key_id=evidence.key_id)

    def _link_named_trajectory(self, evidence: LinkEvidence, name: str) -> Link:
        """Return the trajectory that the client names. Only an explicit version can contradict it."""
        given, (name, trajectory) = name, self._find_named(evidence, name)
        if evidence.follows is not None and name == given:
            leaf: Leaf | None = self._followed_leaf(evidence.follows, name, trajectory)
        else:
            leaf = self._find_parent(evidence, name)[0]
        if trajectory is None:
            return Link(name, None, evidence.explicit_by, leaf, evidence.purpose_if_new, evidence.key_id)
        if evidence.version is not None:
            wanted = f"{evidence.alias}@{evidence.version}"
            remedy = "omit the version or the trajectory id"
            if evidence.version != trajectory.version:
                raise BadRequest(
                    f"trajectory {name} uses {trajectory.alias}@{trajectory.version} and cannot continue on {wanted}: "
                    f"{remedy}"
                )
            if trajectory.purpose != evidence.purpose:
                raise BadRequest(f"trajectory {name} is not an evaluation and cannot become one of {wanted}: {remedy}")
        return Link(name, trajectory.version, evidence.explicit_by, leaf, trajectory.purpose)

    def _find_named(self, evidence: LinkEvidence, name: str) -> tuple[str, OpenTrajectory | None]:
        """Return the id for a client's name, and its trajectory if it is open: one of this key and agent."""
        known, alias, key_id = self._trajectories.get(name), evidence.alias, evidence.key_id
        if known is not None and known.alias != alias and may_share_trajectory(known.key_id, key_id):
            name = name_of_other_agent(name, alias)
        for candidate in candidate_names(name, key_id, alias):
            name, known = candidate, self._trajectories.get(candidate)
            if known is None or (known.alias == alias and may_share_trajectory(known.key_id, key_id)):
                return name, known
        return name, known

    def _followed_leaf(self, call_id: str, name: str, trajectory: OpenTrajectory | None) -> Leaf:
        """Return the answer of the call that the client names, or a leaf without tokens if it is not in memory."""
        known = (leaf for leaf in reversed(trajectory.leaves if trajectory else ()) if leaf.call_id == call_id)
        return next(known, None) or Leaf.of(name, call_id, 0, 0, b"", (), None, b"", 0.0)

    def _find_unanswered_attempt(self, evidence: LinkEvidence, attempt: AttemptKey) -> Link | None:
        """Return the link of an unanswered attempt at the same request; each is used once."""
        since = evidence.arrived_at - (RETRY_WINDOW if evidence.is_retry else RESEND_WINDOW)
        while link := self._attempts.take(attempt, since):
            trajectory = self._trajectories.get(link.trajectory_id)
            same = trajectory is not None and trajectory.alias == evidence.alias
            if (
                trajectory is not None
                and same
                and _may_join(trajectory.purpose, evidence.purpose)
                and evidence.version in (None, trajectory.version)
            ):
                by = "retry" if evidence.is_retry else "resend"
                return Link(link.trajectory_id, trajectory.version, by, link.parent, trajectory.purpose)
        return None

    def _find_parent(self, evidence: LinkEvidence, trajectory_id: str | None) -> tuple[Leaf | None, str]:
        """Return the answer that the request continues, and how it was found."""
        leaves, messages, keys = self._leaves_of(evidence), evidence.messages, evidence.keys
        fits = partial(self._may_continue, evidence=evidence, trajectory_id=trajectory_id)
        if stopped := stopped_answers.find_stopped_leaf(leaves, evidence, fits):
            return stopped, "graph"
        for place in range(len(keys) - 1, -1, -1):
            equal = leaves.leaves_at(keys[place])
            if not equal or messages[place].get("role") != "assistant":
                continue
            if found := [leaf for leaf in equal if self._may_continue(leaf, evidence, trajectory_id)]:
                is_last = all(message.get("role") != "assistant" for message in messages[place + 1 :])
                leaf, by = (None, "") if is_last else self._find_later_answer(evidence, found, place)
                if leaf is None:
                    leaf, by = fuzzy_match.best_of_path(evidence, place, found)
                if leaf is not None:
                    return leaf, by
        if evidence.is_partial:
            raise MessagesNeeded
        if not evidence.answer_digests:
            return None, ""
        return fuzzy_match.find_continued_leaf(leaves, evidence, fits)

    def _find_later_answer(self, evidence: LinkEvidence, found: Sequence[Leaf], place: int) -> tuple[Leaf | None, str]:
        """Return an answer of the same trajectories after `place`, where the path has changed."""
        trajectories = {leaf.trajectory_id for leaf in found}
        leaves = self._leaves_of(evidence)
        return fuzzy_match.find_continued_leaf(leaves, evidence, lambda leaf: leaf.trajectory_id in trajectories, place)

    def _leaves_of(self, evidence: LinkEvidence) -> LeafIndex:
        return self._leaves.get((evidence.alias, owner(evidence.key_id)), _EMPTY)

    def _may_continue(self, leaf: Leaf, evidence: LinkEvidence, trajectory_id: str | None) -> bool:
        trajectory = self._trajectories.get(leaf.trajectory_id)
        is_same_agent = trajectory is not None and trajectory.alias == evidence.alias
        if not is_same_agent or not may_share_trajectory(leaf.key_id, evidence.key_id):
            return False
        if trajectory_id is not None:
            return leaf.trajectory_id == trajectory_id
        if not _may_join(leaf.purpose, evidence.purpose) or leaf.key_id != evidence.key_id:
            return False  # an evaluation and live traffic may have the same messages
        return evidence.version is None or evidence.version == leaf.version

    def adopt_call(self, placement: Placement) -> Link:
        """Record that a call has started which another process placed; return its link with the leaf of this one."""
        link, parent = placement.link, placement.link.parent
        if parent is not None and (own := self.known_answer(parent)) is not None:
            link = msgspec.structs.replace(link, parent=own)
        self.begin_call(link, placement.alias, placement.version, placement.started_at)
        return link

    def known_answer(self, leaf: Leaf) -> Leaf | None:
        """Return this linker's leaf of an answer; None if it is not known."""
        return self.answers_of(leaf.trajectory_id).get((leaf.call_id, leaf.choice))

    def answers_of(self, trajectory_id: str) -> dict[tuple[str, int], Leaf]:
        """Return the known answers of a trajectory, by call id and choice."""
        trajectory = self._trajectories.get(trajectory_id)
        return {(leaf.call_id, leaf.choice): leaf for leaf in trajectory.leaves} if trajectory else {}

    def version_of(self, trajectory_id: str) -> int | None:
        """Return the version of an open trajectory; None for one that is not known."""
        trajectory = self._trajectories.get(trajectory_id)
        return trajectory.version if trajectory else None

    def move(self, link: Link, version: int) -> Link:
        """Move an open trajectory of live traffic to another version; return a link to it there."""
        trajectory = self._trajectories.get(link.trajectory_id)
        if trajectory is not None and (trajectory.version, trajectory.purpose) != (version, MOVED):
            self._pins.remove(link.trajectory_id)
            trajectory.version, trajectory.purpose = version, MOVED
        return msgspec.structs.replace(link, version=version, purpose=MOVED)

    def begin_call(self, link: Link, alias: str, version: int, now: float) -> None:
        """Record that a call of this trajectory has started on this version."""
        trajectory, size = self._trajectories.get(link.trajectory_id), 0
        if trajectory is None:
            trajectory = self._trajectories[link.trajectory_id] = OpenTrajectory(
                alias, version, now, link.purpose, link.key_id
            )
            size = TRAJECTORY_BYTES
            self._remove_idle(now)
        trajectory.open_calls += 1
        self._touch(link.trajectory_id, trajectory, now, size)
        if link.parent is not None:
            self._extend(link.parent)
        if link.quoted is not None:
            link.quoted.is_quoted = True

    def _extend(self, leaf: Leaf) -> None:
        """Mark an answer as extended, and all answers of its call, which are adjacent, as taken."""
        leaf.is_extended = leaf.is_taken = True
        trajectory, own = self._trajectories.get(leaf.trajectory_id), leaf.details
        for other in reversed(trajectory.leaves if trajectory else ()):
            details = own if other is leaf else other.details
            if details.call_id == own.call_id:
                other.is_taken = True
                if trajectory is not None and other is leaf:
                    self._forget_arguments(trajectory, leaf)
            elif details.created_at < own.created_at:
                return

    def _forget_arguments(self, trajectory: OpenTrajectory, leaf: Leaf) -> None:
        """Forget the arguments of an extended answer's tool calls; most of an agent's answers are extended."""
        size = self._leaves[trajectory.alias, owner(leaf.key_id)].forget_arguments(leaf)
        self._quotas.add_use(trajectory.key_id, leaf.trajectory_id, -size)

    def task_family(self, trajectory_id: str, task: str | None, tools_hash: str) -> str:
        """Return the task family of a trajectory: that of its first call. `task` and `tools_hash` are a call's."""
        trajectory = self._trajectories.get(trajectory_id)
        family = trajectory.family if trajectory else None
        if family is None:
            family = family_of(task, tools_hash)
            if trajectory is not None:
                trajectory.family = family
        return family

    def end_call(self, link: Link, leaves: Iterable[Leaf], now: float) -> None:
        """Record that a call of this trajectory has ended; `leaves` are its answers."""
        trajectory = self._trajectories.get(link.trajectory_id)
        if trajectory is None:
            return
        trajectory.open_calls = max(0, trajectory.open_calls - 1)
        size = sum([self._add_leaf(trajectory, leaf) for leaf in leaves])
        self._touch(link.trajectory_id, trajectory, now, size)
        self._evict(trajectory.key_id)

    def add_unanswered(self, link: Link, attempt: AttemptKey, now: float) -> None:
        """Record an attempt without an answer, for a retry. A retry with an explicit id needs no record."""
        if link.linked_by not in _EXPLICIT:
            self._attempts.add(attempt, link, now)

    def restore_answers(self, answers: Iterable[tuple[OpenLeaf, Leaf]]) -> None:
        """Add answers of the store, as far as they are not known: whole trajectories, and of each the oldest first."""
        for trajectory_id, group in groupby(answers, lambda answer: answer[1].trajectory_id):
            found, own = [*group], self.answers_of(trajectory_id)
            extended = {leaf.call_id for stored, leaf in found if stored.extended}
            for stored, restored in found:
                leaf = own.get((restored.call_id, restored.choice), restored)
                is_news = stored.extended and not leaf.is_extended
                leaf.is_extended = leaf.is_extended or stored.extended
                leaf.is_taken = leaf.is_taken or leaf.call_id in extended
                if leaf is restored and len(own) < _MAX_LEAVES:  # else it would push out a later one
                    trajectory = self._restored_trajectory(stored, leaf.key_id)
                    self._quotas.add_use(trajectory.key_id, trajectory_id, self._add_leaf(trajectory, leaf))
                elif leaf is not restored and is_news:
                    self._forget_arguments(self._trajectories[trajectory_id], leaf)

    def finish_restore(self, now: float, attempts: Iterable[UnansweredCall] = (), *, is_whole: bool = True) -> None:
        """Add the store's unanswered attempts, oldest first, and bring all trajectories in the order of their use.

        Not `is_whole`: the store had more answers than are restored, or did not answer.
        """
        for attempt in attempts:
            self._restored_trajectory(attempt, attempt.key_id)
            own, parent = self.answers_of(attempt.trajectory_id), (attempt.parent_call or "", attempt.parent_choice)
            if attempt.parent_call is None or parent in own:  # else its repetition would lack its parent
                self._attempts.add(*attempt_from_store(attempt, own.get(parent)))
        self._trajectories = OrderedDict(sorted(self._trajectories.items(), key=lambda item: item[1].last_active_at))
        for trajectory_id, trajectory in self._trajectories.items():
            self._pins.touch(trajectory_id, trajectory)
            self._quotas.add_use(trajectory.key_id, trajectory_id)
        for key_id in {trajectory.key_id for trajectory in self._trajectories.values()}:
            self._evict(key_id)
        self._remove_idle(now)

    def _restored_trajectory(self, known: OpenLeaf | UnansweredCall, key_id: str | None) -> OpenTrajectory:
        trajectory = self._trajectories.get(known.trajectory_id)
        if trajectory is None:
            trajectory = OpenTrajectory(
                known.alias, known.version, known.last_active_at, known.purpose, key_id, known.family
            )
            self._trajectories[known.trajectory_id] = trajectory
            self._quotas.add_use(key_id, known.trajectory_id, TRAJECTORY_BYTES)
        return trajectory

    def forget_trajectory(self, trajectory_id: str) -> None:
        """Remove a trajectory: it is complete, and the next call starts another one."""
        trajectory = self._trajectories.pop(trajectory_id, None)
        self._pins.remove(trajectory_id)
        if trajectory is not None:
            size = TRAJECTORY_BYTES + sum([self._remove_leaf(trajectory, leaf) for leaf in trajectory.leaves])
            self._quotas.remove(trajectory.key_id, trajectory_id, size)

    def count_pins(self, now: float, idle_seconds: float) -> dict[str, int]:
        """Return the number of trajectories that pin each `alias@version`: active within `idle_seconds`, or open."""
        return self._pins.counts(now, idle_seconds)

    def _touch(self, trajectory_id: str, trajectory: OpenTrajectory, now: float, size: int) -> None:
        trajectory.last_active_at = now
        self._trajectories.move_to_end(trajectory_id)
        self._quotas.add_use(trajectory.key_id, trajectory_id, size)
        self._pins.touch(trajectory_id, trajectory)

    def _add_leaf(self, trajectory: OpenTrajectory, leaf: Leaf) -> int:
        """Add an answer; return by how many bytes the trajectory grows."""
        scope = trajectory.alias, owner(leaf.key_id)
        index = self._leaves.get(scope)
        if index is None:
            index = self._leaves[scope] = LeafIndex()
        trajectory.add(leaf)
        size = index.add(leaf)
        if len(trajectory.leaves) > _MAX_LEAVES:
            size -= self._remove_leaf(trajectory, trajectory.leaves.pop(0))
        return size

    def _remove_leaf(self, trajectory: OpenTrajectory, leaf: Leaf) -> int:
        """Remove an answer from the indexes; return how many bytes it took."""
        scope = trajectory.alias, owner(leaf.key_id)
        size = self._leaves[scope].remove(leaf)
        if not self._leaves[scope]:
            del self._leaves[scope]
        return size

    def _remove_idle(self, now: float) -> None:
        """Remove trajectories that have been idle for too long, two per call."""
        for _ in range(min(2, len(self._trajectories))):
            trajectory_id, trajectory = next(iter(self._trajectories.items()))
            if trajectory.open_calls:
                self._trajectories.move_to_end(trajectory_id)
            elif now - trajectory.last_active_at > self._idle:
                self.forget_trajectory(trajectory_id)
            else:
                return

    def _evict(self, key_id: str | None) -> None:
        """Remove the least recently active trajectories above the limits, but none with an open call."""
        skipped = 0
        while skipped < _MAX_SKIPPED and (trajectory_id := self._quotas.next_to_evict(key_id)) is not None:
            trajectory = self._trajectories[trajectory_id]
            if trajectory.open_calls:
                self._quotas.add_use(trajectory.key_id, trajectory_id)
                skipped += 1
            else:
                self.forget_trajectory(trajectory_id)


def _may_join(purpose: str, new: str) -> bool:
    """Return whether a call of the purpose `new` may join a trajectory: live traffic also one that was moved."""
    return purpose == new or (purpose in (MOVED, UNLINKED) and new == "live")
