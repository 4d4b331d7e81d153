"""Restores linking from the store after a restart: open answers and unanswered attempts.

The store has the first and the last message of a prompt, where a task is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from ratchet.proxy.coordinator.linking.unanswered_attempts import RETRY_WINDOW
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints, fingerprints_of, short_key
from ratchet.store.calls.resume_state import MAX_OPEN_LEAVES
from ratchet.store.content import messages as canon
from ratchet.store.errors import StoreError
from ratchet.store.records import OpenLeaf, UnansweredCall
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class RestoredLinker(Protocol):
    """What is restored."""

    def restore_answers(self, answers: Iterable[tuple[OpenLeaf, Leaf]]) -> None:
        """Add answers of whole trajectories."""

    def finish_restore(self, now: float, attempts: Iterable[UnansweredCall] = (), *, is_whole: bool = True) -> None:
        """Add unanswered attempts; all answers are there, or, if not `is_whole`, the latest or none."""


class LinkingRestore:
    """A service that restores the linker at start. If the store does not answer, linking starts empty.

    Then, and if there were too many answers, histories of which no answer is known are marked: `cautious_linker.py`.
    With several workers, their sessions restore it, again if calls were missing: what is known stays as it is.
    Each batch is read and decoded in another thread; between two of them the event loop does its other work.
    """

    def __init__(
        self, linker: RestoredLinker, store: Store, idle_seconds: float, max_answers: int = MAX_OPEN_LEAVES
    ) -> None:
        self._max_answers = max_answers
        self._linker = linker
        self._store = store
        self._idle_seconds = idle_seconds
        self._is_restored = False

    async def start(self) -> None:
        """Read the open answers; the journal has been replayed into the store before."""
        await self.restore()

    async def restore(self) -> bool:
        """Read the open answers; return whether the store has answered."""
        now = time.time()
        since = now - self._idle_seconds
        calls: Sequence[UnansweredCall] = ()
        count, is_whole = 0, False
        try:
            batches = self._store.resume_state.open_leaves(since, self._max_answers)
            while answers := await asyncio.to_thread(_next_answers, batches):
                self._linker.restore_answers(answers)
                count += len(answers)
            if not self._is_restored:  # an attempt is repeated once
                read = self._store.resume_state.unanswered_calls
                calls = await asyncio.to_thread(read, max(since, now - RETRY_WINDOW))
                self._is_restored = True
            is_whole = count < self._max_answers
        except StoreError as error:
            log.warning("event=linking_not_restored reason=%r", str(error))
            return False
        finally:
            self._linker.finish_restore(now, calls, is_whole=is_whole)
        return True

    async def stop(self) -> None:
        """Nothing to stop."""


def _next_answers(batches: Iterator[Sequence[OpenLeaf]]) -> list[tuple[OpenLeaf, Leaf]]:
    """Return the next batch; an empty one at the end. Raises StoreError."""
    return [(stored, leaf_from_store(stored)) for stored in next(batches, ())]


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
