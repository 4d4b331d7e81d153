"""The token ids of open answers, onto which later calls are spliced.

Bounded in bytes. Answers that were continued are evicted first, because the next answer contains their ids, then the
least recently used. The bound is low until a context is requested, because vLLM may not offer the endpoints that
splicing needs. Evicted contexts are read from the store in a thread; a call waits for that `_READ_SECONDS` at most. A
context must match the fingerprint that linking has.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from ratchet.proxy.exact.splice import EMPTY_CONTEXT, Context
from ratchet.proxy.messages.link_records import Leaf, token_fingerprint
from ratchet.proxy.runtime.thread_pools import run_call_lookup
from ratchet.store.content.token_sequences import sampled_spans, sequences, token_call
from ratchet.store.errors import RecordNotFound, StoreError
from ratchet.store.records import OTHER, CallEnded
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

Key = tuple[str, int]  # (call id, choice)

_RECORD = 500  # bytes of a context besides its ids
_MAX_BYTES = 16 * 2**20
_MIN_BYTES = 2**20  # the bound until a context is requested
_READ_SECONDS = 2.0  # that a call waits for the store


class TokenContexts:
    """The contexts of answers, by call and choice. `max_bytes` bounds their ids."""

    def __init__(self, store: Store, max_bytes: int = _MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._in_use = False
        self._contexts: OrderedDict[Key, Context] = OrderedDict()
        self._late: set[asyncio.Future[Context | None]] = set()  # readings that no call waits for any more
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def __contains__(self, key: object) -> bool:
        return key in self._contexts

    def add_answers(self, record: CallEnded) -> None:
        """Add the answers of a call that has ended."""
        start, before = record.start, EMPTY_CONTEXT
        if record.untrainable or not record.choices or start.purpose == OTHER:
            return
        if record.context == "exact":
            parent = self._contexts.get((start.parent_call or "", start.parent_choice))
            if parent is None:  # `find_context` reads it from the store
                return
            before = parent
            self._contexts.move_to_end((start.parent_call or "", start.parent_choice), last=False)
        for choice in record.choices:
            self._put((start.call_id, choice.index), before.followed(record.prompt_ids, choice.token_ids))

    async def find_context(self, leaf: Leaf) -> Context | None:
        """Return the context of an answer; None if it is unknown, or if the store does not answer in time."""
        self._in_use = True
        key = (leaf.call_id, leaf.choice)
        context = self._contexts.get(key)
        if context is None:
            context = await self._read_in_time(leaf.trajectory_id, key)
            if context is not None:
                self._put(key, context)
        if context is None or leaf.sequence != token_fingerprint(context.ids):
            return None
        self._contexts.move_to_end(key)
        return context

    def shrink(self) -> None:
        """Apply the low bound until the next request: vLLM does not offer the endpoints."""
        self._in_use = False
        self._shrink()

    def _put(self, key: Key, context: Context) -> None:
        if (old := self._contexts.pop(key, None)) is not None:
            self.bytes -= _size(old)
        self._contexts[key] = context
        self.bytes += _size(context)
        self._shrink()

    def _shrink(self) -> None:
        limit = self._max_bytes if self._in_use else min(self._max_bytes, _MIN_BYTES)
        while self.bytes > limit:
            _, gone = self._contexts.popitem(last=False)
            self.bytes -= _size(gone)

    async def _read_in_time(self, trajectory_id: str, key: Key) -> Context | None:
        """Read from the store; while one reading is late, no other one begins."""
        if self._late:
            return None
        reading = asyncio.ensure_future(run_call_lookup(self._read, trajectory_id, key))
        done, _ = await asyncio.wait({reading}, timeout=_READ_SECONDS)
        if done:
            return reading.result()
        log.info("event=context_not_read trajectory=%s reason='the store does not answer'", trajectory_id)
        self._late.add(reading)
        reading.add_done_callback(self._late.discard)
        return None

    def _read(self, trajectory_id: str, key: Key) -> Context | None:
        try:
            calls = self._store.trajectories.context_calls(self._store.trajectories.read(trajectory_id))
        except StoreError as error:
            level = logging.DEBUG if isinstance(error, RecordNotFound) else logging.INFO  # usual: it is on its way
            log.log(level, "event=context_not_read trajectory=%s reason=%r", trajectory_id, str(error))
            return None
        ids = sequences(map(token_call, calls)).get(key)
        return Context(ids, sampled_spans(calls, key)) if ids else None


def _size(context: Context) -> int:
    return len(context.ids) + _RECORD
