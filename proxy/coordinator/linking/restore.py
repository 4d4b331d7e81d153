"""Restores linking from the store after a restart: open answers and unanswered attempts.

The store has the first and the last message of a prompt, where a task is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ratchet.proxy.coordinator.linking.unanswered_attempts import RETRY_WINDOW
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints, fingerprints_of, short_key
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.store.calls.resume_state import AnswerName, OpenTrajectories
from ratchet.store.content import messages as canon
from ratchet.store.errors import RecordDamaged, StoreError
from ratchet.store.records import OpenLeaf, UnansweredCall
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_FIRST_BATCHES = 40  # about 10,000 answers, a second's work
_RETRY_SECONDS = 1.0  # while the store does not answer

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class RestoredLinker(Protocol):
    """What is restored."""

    def answers_of(self, trajectory_id: str) -> Mapping[tuple[str, int], Leaf]:
        """Return the known answers of a trajectory, by call id and choice."""

    def restore_answers(self, answers: Iterable[tuple[OpenLeaf, Leaf]]) -> None:
        """Add answers of whole trajectories."""

    def finish_restore(self, now: float, attempts: Iterable[UnansweredCall] = (), *, is_whole: bool = True) -> None:
        """Add unanswered attempts; all answers are there, or, if not `is_whole`, the latest or none."""


class LinkingRestore:
    """A service that restores the linker, at most `max_answers`: the latest before calls begin, the others meanwhile.

    Until all are restored, calls that may belong to one that is not are marked: `cautious_linker.py`. So are they while
    the store does not answer: linking starts empty then, and is restored as soon as the store answers. `at_start`: at
    the start of the service; with several workers, their sessions restore it, again if calls were missing: what is
    known stays as it is.
    Each batch is read and decoded in another thread; between two of them the event loop does its other work.
    """

    def __init__(
        self,
        linker: RestoredLinker,
        store: Store,
        idle_seconds: float,
        max_answers: int,
        critical_tasks: CriticalTasks,
        *,
        at_start: bool,
        first_batches: int = _FIRST_BATCHES,
    ) -> None:
        self._linker = linker
        self._resume_state = store.resume_state
        self._idle_seconds = idle_seconds
        self._max_answers = max_answers
        self._critical_tasks = critical_tasks
        self._first_batches = first_batches
        self._is_first = True  # nothing has been restored yet
        self._at_start = at_start
        self._retries: asyncio.Task[None] | None = None
        self._rest: asyncio.Task[None] | None = None  # restores what calls do not wait for
        self._lacks_damaged = False  # a trajectory could not be read

    async def start(self) -> None:
        """Read the open answers; the journal has been replayed into the store before."""
        if self._at_start and not await self.restore():
            self._retries = self._critical_tasks.start_task(self._retry(), "linking")

    async def stop(self) -> None:
        """Leave out what is not restored yet."""
        tasks = [task for task in (self._retries, self._rest) if task is not None]
        await self._critical_tasks.stop_tasks(*tasks)

    async def restore(self) -> bool:
        """Read the open answers: the first time the latest ones, while a task reads the others.

        Return whether the store has answered.
        """
        if self._rest is not None:
            await asyncio.wait([self._rest])
        now, is_first = time.time(), self._is_first
        since = now - self._idle_seconds
        calls: Sequence[UnansweredCall] = ()
        is_whole = False
        try:
            found = await asyncio.to_thread(self._resume_state.open_trajectories, since, self._max_answers)
            count = self._first_batches if is_first else len(found.batches)
            await self._restore(found.batches[:count], is_first=is_first)
            if is_first:  # an attempt is repeated once
                read = self._resume_state.unanswered_calls
                calls = await asyncio.to_thread(read, max(since, now - RETRY_WINDOW))
            is_whole = found.is_whole and count >= len(found.batches) and not self._lacks_damaged
        except StoreError as error:
            log.warning("event=linking_not_restored reason=%r", str(error))
            return False
        finally:
            self._linker.finish_restore(now, calls, is_whole=is_whole)
        self._is_first = False
        if count < len(found.batches):
            rest = OpenTrajectories(found.batches[count:], found.is_whole)
            self._rest = self._critical_tasks.start_task(self._restore_rest(rest), "linking")
        return True

    async def _retry(self) -> None:
        while not await self.restore():
            await asyncio.sleep(_RETRY_SECONDS)

    async def _restore_rest(self, found: OpenTrajectories) -> None:
        for batch in found.batches:
            restored = False
            while not restored:
                try:
                    await self._restore([batch], is_first=False)
                    restored = True
                except StoreError as error:
                    log.warning("event=linking_not_restored reason=%r", str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
        self._linker.finish_restore(time.time(), is_whole=found.is_whole and not self._lacks_damaged)
        log.info("event=older_answers_restored trajectories=%d", sum(map(len, found.batches)))

    async def _restore(self, batches: Sequence[Sequence[str]], *, is_first: bool) -> None:
        """Read the answers of trajectories. Raises StoreError."""
        for batch in batches:
            unknown = batch if is_first else await self._unknown(batch)
            if unknown:
                self._linker.restore_answers(await asyncio.to_thread(self._read, unknown))

    async def _unknown(self, trajectory_ids: Sequence[str]) -> Sequence[str]:
        """Return the trajectories that have other answers in the store than here. Raises StoreError."""
        names = await asyncio.to_thread(self._resume_state.answer_names, trajectory_ids)
        known = {one: self._linker.answers_of(one) for one in trajectory_ids}
        unknown = {name.trajectory_id for name in names if not _is_known(name, known[name.trajectory_id])}
        return [one for one in trajectory_ids if one in unknown]

    def _read(self, trajectory_ids: Sequence[str]) -> list[tuple[OpenLeaf, Leaf]]:
        """Return the answers of trajectories, except damaged ones. Raises StoreError."""
        try:
            return [(stored, leaf_from_store(stored)) for stored in self._resume_state.open_leaves(trajectory_ids)]
        except (RecordDamaged, msgspec.DecodeError) as error:
            if len(trajectory_ids) > 1:
                return [answer for one in trajectory_ids for answer in self._read([one])]
            self._lacks_damaged = True
            log.warning("event=trajectory_not_restored trajectory=%s reason=%r", trajectory_ids[0], str(error))
            return []


def _is_known(name: AnswerName, known: Mapping[tuple[str, int], Leaf]) -> bool:
    leaf = known.get((name.call_id, name.choice))
    return leaf is not None and (leaf.is_extended or not name.is_extended)


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
