"""Restores linking from the store after a restart: open answers and unanswered attempts.

The store has the first and the last message of a prompt, where a task is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ratchet.proxy.coordinator.linking.unanswered_attempts import RETRY_WINDOW
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints, fingerprints_of, short_key
from ratchet.store.calls.resume_state import AnswerName, Answers
from ratchet.store.content import messages as canon
from ratchet.store.db.column_types import NOT_DECODED
from ratchet.store.errors import RecordDamaged, StoreError
from ratchet.store.records import OpenLeaf, UnansweredCall
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_MAX_ANSWERS = 20_000  # that are restored: calls wait for it, two to three seconds

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class RestoredLinker(Protocol):
    """What is restored."""

    def answers_of(self, trajectory_id: str) -> Mapping[tuple[str, int], Leaf]:
        """Return the known answers of a trajectory, by call id and choice."""

    def begin_restore(self) -> None:
        """The store is going to be read: from now on, what is forgotten is not restored."""

    def restore_answers(self, answers: Iterable[tuple[OpenLeaf, Leaf]]) -> None:
        """Add answers of whole trajectories."""

    def finish_restore(self, now: float, attempts: Iterable[UnansweredCall] = (), *, is_whole: bool = True) -> None:
        """Add unanswered attempts; all answers are there, or, if not `is_whole`, the latest or none."""


class LinkingRestore:
    """A service that restores the linker at start. If the store does not answer, linking starts empty.

    Then, and if there were too many answers, histories of which no answer is known are marked: `cautious_linker.py`.
    With several workers, their sessions restore it, again if calls were missing: what is known stays as it is, and is
    not read again. Each batch is read and decoded in another thread; between two of them the event loop does its other
    work. A trajectory that is damaged in the store is left out.
    """

    def __init__(
        self, linker: RestoredLinker, store: Store, idle_seconds: float, max_answers: int = _MAX_ANSWERS
    ) -> None:
        self._max_answers = max_answers
        self._linker = linker
        self._resume_state = store.resume_state
        self._idle_seconds = idle_seconds
        self._is_restored = False
        self._lacks_damaged = False  # a trajectory could not be read

    async def start(self) -> None:
        """Read the open answers; the journal has been replayed into the store before."""
        await self.restore()

    async def restore(self) -> bool:
        """Read the open answers; return whether the store has answered."""
        now = time.time()
        since = now - self._idle_seconds
        calls: Sequence[UnansweredCall] = ()
        is_whole, self._lacks_damaged = False, False
        self._linker.begin_restore()
        try:
            batches = await asyncio.to_thread(self._resume_state.open_answers, since, self._max_answers)
            for answers in batches:
                await self._restore(answers)
            if not self._is_restored:  # an attempt is repeated once
                read = self._resume_state.unanswered_calls
                calls = await asyncio.to_thread(read, max(since, now - RETRY_WINDOW))
                self._is_restored = True
            count = sum(len(names) for answers in batches for names in answers.values())
            is_whole = count < self._max_answers and not self._lacks_damaged
        except StoreError as error:
            log.warning("event=linking_not_restored reason=%r", str(error))
            return False
        finally:
            self._linker.finish_restore(now, calls, is_whole=is_whole)
        return True

    async def stop(self) -> None:
        """Nothing to stop."""

    async def _restore(self, answers: Answers) -> None:
        """Read the answers of trajectories of which not all is known. Raises StoreError."""
        if self._is_restored:  # most is known
            extended = await asyncio.to_thread(self._resume_state.extended_answers, list(answers))
            answers = {one: names for one, names in answers.items() if not self._is_known(one, names, extended)}
        if answers:
            self._linker.restore_answers(await asyncio.to_thread(self._read, answers))

    def _is_known(self, trajectory_id: str, names: Iterable[AnswerName], extended: Collection[AnswerName]) -> bool:
        known = self._linker.answers_of(trajectory_id)
        return all(name in known and (known[name].is_extended or name not in extended) for name in names)

    def _read(self, answers: Answers) -> list[tuple[OpenLeaf, Leaf]]:
        """Return the answers, except those of damaged trajectories. Raises StoreError."""
        try:
            return [(stored, leaf_from_store(stored)) for stored in self._resume_state.open_leaves(answers)]
        except (RecordDamaged, *NOT_DECODED) as error:
            if len(answers) > 1:
                return [found for one, names in answers.items() for found in self._read({one: names})]
            self._lacks_damaged = True
            log.warning("event=trajectory_not_restored trajectory=%s reason=%r", next(iter(answers)), str(error))
            return []


def leaf_from_store(stored: OpenLeaf) -> Leaf:
    """Return the leaf of a stored answer."""
    return Leaf.of(
        trajectory_id=stored.trajectory_id,
        call_id=stored.call_id,
        choice=stored.choice,
        version=stored.version,
        link_key=short_key(stored.link_key),
        tool_call_ids=stored.tool_call_ids,
        key_id=stored.key_id,
        sequence=token_fingerprint(stored.sequence),
        created_at=stored.last_active_at,
        purpose=stored.purpose,
        is_extended=stored.extended,
        fingerprints=_fingerprints(stored),
    )


def attempt_from_store(stored: UnansweredCall, parent: Leaf | None) -> tuple[AttemptKey, Link, float]:
    """Return an unanswered attempt: its key, its link, and when it ended."""
    link = Link(stored.trajectory_id, stored.version, stored.linked_by, parent, stored.purpose, stored.key_id)
    return AttemptKey(stored.alias, stored.key_id, stored.prompt_node, stored.tools_hash), link, stored.ended_at


def _fingerprints(stored: OpenLeaf) -> TextFingerprints:
    if not stored.reply:
        return NO_FINGERPRINTS
    answer = _decode(stored.reply)
    (answer_key,) = canon.answer_keys([canon.ANYWHERE], answer)
    return fingerprints_of(
        answer, stored.skip_last_key or "", answer_key, [_decode(body) for body in stored.prompt_messages]
    )
