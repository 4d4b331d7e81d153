"""Linking while calls are missing: what other workers served is not known here, or not all of it.

A worker whose coordinator is away knows its own calls only; a coordinator may miss those of a worker that is cut off,
or died with its last calls. A call then continues only a trajectory that it names, or the last answer that it repeats,
at the same path, if that was not continued and is distinctive: its tool-call ids are random, or, where no other
trajectory is alike, its text is long. Everything else starts a trajectory of the purpose `unlinked`, which is never
trained: it may be the rest of another one. So is, later, a call that repeats answers of such a trajectory and of
others, and belongs to none. So is, after a restart that could not restore all open answers, a history of which no
answer is known, and one that continues an answer from before it without being certain to: also in a proxy of one
process, whose `doubt` is NONE. Nothing is merged on a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

import msgspec

from ratchet.proxy.coordinator.linking.fuzzy_match import repeats_any
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.quote_match import quotes_any
from ratchet.proxy.messages.link_records import Leaf, Link, LinkEvidence
from ratchet.proxy.messages.text_fingerprints import is_distinctive_id, short_key
from ratchet.store.ids import new_id
from ratchet.store.records import UNLINKED, OpenLeaf, UnansweredCall

LINKED_BY = "unlinked"  # how the trajectory of such a call was found


class Doubt(IntEnum):
    """Which calls of other workers are missing."""

    NONE = 0
    EARLIER = 1  # those of some time ago: a call without history begins a trajectory
    RECENT = 2  # also those of a moment ago
    ALL = 3  # every one: that no known trajectory is alike says nothing


class CautiousLinker(TrajectoryLinker):
    """Links calls where that is certain; like `TrajectoryLinker` while `doubt` returns NONE."""

    def __init__(self, idle_seconds: float, max_bytes: int, max_bytes_per_key: int) -> None:
        super().__init__(idle_seconds, max_bytes, max_bytes_per_key)
        self.doubt: Callable[[], Doubt] = lambda: Doubt.ALL
        self._unlinked_at = float("-inf")  # when a call of an unlinked trajectory began last
        self._forgotten: set[str] | None = None  # the trajectories that were removed while a restore ran
        self._partly_at = float("-inf")  # when not all answers were restored; what was not matters for the idle time

    def find_link(self, evidence: LinkEvidence) -> Link:
        """Return a request's place. Raises BadRequest and MessagesNeeded as in `TrajectoryLinker`."""
        doubt, link = self.doubt(), super().find_link(evidence)
        if doubt == Doubt.NONE and not self._may_belong_elsewhere(link, evidence):
            return link
        if link.version is not None:
            if evidence.explicit is not None or self._is_certain(link, evidence, doubt):
                return link
            link = Link(new_id("traj"), None, LINKED_BY, purpose=evidence.purpose, key_id=evidence.key_id)
        elif doubt == Doubt.EARLIER and not _has_history(evidence) and not self._may_be_rest(evidence):
            return link
        purpose = UNLINKED if link.purpose == "live" else link.purpose
        return msgspec.structs.replace(link, purpose=purpose, linked_by=evidence.explicit_by or LINKED_BY)

    def begin_call(self, link: Link, alias: str, version: int, now: float) -> None:
        """Record that a call of this trajectory has started on this version."""
        if link.purpose == UNLINKED:
            self._unlinked_at = now
        super().begin_call(link, alias, version, now)

    def forget_trajectory(self, trajectory_id: str) -> None:
        """Remove a trajectory. A restore that runs does not bring it back, although it may have read it before."""
        if self._forgotten is not None:
            self._forgotten.add(trajectory_id)
        super().forget_trajectory(trajectory_id)

    def begin_restore(self) -> None:
        """The store is going to be read for `restore_answers`."""
        self._forgotten = set()

    def restore_answers(self, answers: Iterable[tuple[OpenLeaf, Leaf]]) -> None:
        """Add answers of the store that are not known, except those of trajectories removed during the restore."""
        forgotten = self._forgotten or ()
        found = [(stored, leaf) for stored, leaf in answers if leaf.trajectory_id not in forgotten]
        unlinked = [stored.last_active_at for stored, _ in found if stored.purpose == UNLINKED]
        self._unlinked_at = max([*unlinked, self._unlinked_at])
        super().restore_answers(found)

    def finish_restore(self, now: float, attempts: Iterable[UnansweredCall] = (), *, is_whole: bool = True) -> None:
        """As in `TrajectoryLinker`; if not `is_whole`, a history whose answers are not known may be a known one's."""
        forgotten, self._forgotten = self._forgotten or (), None
        attempts = [attempt for attempt in attempts if attempt.trajectory_id not in forgotten]
        self._partly_at = float("-inf") if is_whole else now
        super().finish_restore(now, attempts, is_whole=is_whole)

    def _may_belong_elsewhere(self, link: Link, evidence: LinkEvidence) -> bool:
        """Return whether a call may belong to another trajectory although no calls of workers are missing."""
        if link.version is None:
            return self._may_be_unrestored(evidence) or self._may_be_rest(evidence)
        return self._is_partly_restored(evidence) and self._may_be_other(link)

    def _is_partly_restored(self, evidence: LinkEvidence) -> bool:
        return evidence.explicit is None and evidence.arrived_at < self._partly_at + self._idle

    def _may_be_unrestored(self, evidence: LinkEvidence) -> bool:
        return self._is_partly_restored(evidence) and _has_history(evidence)

    def _may_be_other(self, link: Link) -> bool:
        """Return whether an answer like the one that is continued, or its continuation, may not have been restored."""
        if link.parent is None or link.quoted is not None or link.linked_by in ("retry", "resend"):
            return False
        return link.purpose != UNLINKED and link.parent.created_at < self._partly_at

    def _may_be_rest(self, evidence: LinkEvidence) -> bool:
        """Return whether a call without a trajectory repeats an answer of an unlinked one."""
        if evidence.explicit is not None or evidence.arrived_at - self._unlinked_at > self._idle:
            return False

        def is_unlinked(leaf: Leaf) -> bool:
            trajectory = self._trajectories.get(leaf.trajectory_id)
            unlinked = trajectory is not None and trajectory.purpose == UNLINKED
            return unlinked and self._may_continue(leaf, evidence, None)

        leaves = self._leaves_of(evidence)
        return repeats_any(leaves, evidence, is_unlinked) or quotes_any(leaves, evidence.messages, is_unlinked)

    def _is_certain(self, link: Link, evidence: LinkEvidence, doubt: Doubt) -> bool:
        leaf = link.parent
        if leaf is None or leaf.is_taken or link.quoted is not None or leaf.link_key != short_key(_last_key(evidence)):
            return False
        if leaf.tool_call_ids:
            return link.linked_by == "graph+tool_ids" and any(map(is_distinctive_id, leaf.tool_call_ids))
        is_exact = link.linked_by == "graph" and leaf.fingerprints.is_distinctive
        return is_exact and doubt != Doubt.ALL and self._is_unlike_others(leaf, evidence)

    def _is_unlike_others(self, leaf: Leaf, evidence: LinkEvidence) -> bool:
        equal = self._leaves_of(evidence).leaves_at(_last_key(evidence))
        return all(other.trajectory_id == leaf.trajectory_id for other in equal)


def _last_key(evidence: LinkEvidence) -> str:
    """Return the link key of the last answer in a request: if that is not known, an earlier one proves nothing."""
    places = [place for place, message in enumerate(evidence.messages) if message.get("role") == "assistant"]
    return evidence.keys[places[-1]] if places else ""


def _has_history(evidence: LinkEvidence) -> bool:
    return evidence.is_partial or any(message.get("role") == "assistant" for message in evidence.messages)
