"""The ids of open answers, so that coming calls can be spliced onto them.

Bounded in bytes: those that were continued go first (the next answer holds their ids, too), then the stillest. Only a
few are held as long as nobody asks for one, since vLLM may not offer what they are for. What is not here any more is
read from the store, off the event loop. A context that linking does not know is not given out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from ratchet.proxy.exact.splice import EMPTY_CONTEXT, Context
from ratchet.proxy.messages.link_records import Leaf, TokenFingerprint
from ratchet.proxy.runtime.thread_pools import run_call_lookup
from ratchet.store.content.token_sequences import sampled_spans, sequences
from ratchet.store.errors import StoreError
from ratchet.store.records import OTHER, CallEnded
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

Key = tuple[str, int]  # (call id, choice)

_RECORD = 500  # bytes that a context takes besides its ids
_MIN_BYTES = 2**20  # bytes until the first is asked for


class TokenContexts:
    """The contexts of answers, by call and choice. `max_bytes` bounds their ids."""

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store = store
        self._most = max_bytes
        self._asked = False
        self._held: OrderedDict[Key, Context] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def add_answers(self, record: CallEnded) -> None:
        """Keep the answers of a call that has ended."""
        start, before = record.start, EMPTY_CONTEXT
        if record.untrainable or not record.choices or start.purpose == OTHER:
            return
        if record.context == "exact":
            parent = self._held.get((start.parent_call or "", start.parent_choice))
            if parent is None:  # the store knows it
                return
            before = parent
            self._held.move_to_end((start.parent_call or "", start.parent_choice), last=False)
        for choice in record.choices:
            self._put((start.call_id, choice.index), before.followed(record.prompt_ids, choice.token_ids))

    async def find_context(self, leaf: Leaf) -> Context | None:
        """Return the context of an answer, or None where nobody knows it any more."""
        self._asked = True
        key = (leaf.call_id, leaf.choice)
        context = self._held.get(key)
        if context is None:
            context = await run_call_lookup(self._read, leaf.trajectory_id, key)
            if context is not None:
                self._put(key, context)
        if context is None or leaf.sequence != TokenFingerprint.of_ids(context.ids):
            return None
        self._held.move_to_end(key)
        return context

    def shrink(self) -> None:
        """Hold few again until the next is asked for: vLLM offers nothing to do with them."""
        self._asked = False
        self._shrink()

    def _put(self, key: Key, context: Context) -> None:
        if (old := self._held.pop(key, None)) is not None:
            self.bytes -= _size(old)
        self._held[key] = context
        self.bytes += _size(context)
        self._shrink()

    def _shrink(self) -> None:
        most = self._most if self._asked else min(self._most, _MIN_BYTES)
        while self.bytes > most:
            _, gone = self._held.popitem(last=False)
            self.bytes -= _size(gone)

    def _read(self, trajectory_id: str, key: Key) -> Context | None:
        try:
            calls = self._store.trajectories.context_calls(self._store.trajectories.read(trajectory_id))
        except StoreError as error:
            log.info("event=context_not_read trajectory=%s reason=%r", trajectory_id, str(error))
            return None
        ids = sequences(calls).get(key)
        return Context(ids, sampled_spans(calls, key)) if ids else None


def _size(context: Context) -> int:
    return len(context.ids) + _RECORD
