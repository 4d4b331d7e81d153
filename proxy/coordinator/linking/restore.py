"""Restores linking from the store after a restart: open answers and unanswered attempts.

The store has the first and the last message of a prompt, where a task is. It has no hash of the path without the
prompt's last message, so restored fingerprints lack it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ratchet.proxy.coordinator.linking.unanswered_attempts import RETRY_WINDOW
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, TokenFingerprint
from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints, fingerprints_of
from ratchet.store.content import messages as canon
from ratchet.store.errors import StoreError
from ratchet.store.records import OpenLeaf, UnansweredCall
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class LinkingRestore:
    """A service that restores the linker at start. If the store does not answer, linking starts empty.

    With several workers, their sessions restore it, again if calls were missing: what is known stays as it is.
    """

    def __init__(
        self,
        restore: Callable[[Sequence[OpenLeaf], float, Sequence[UnansweredCall]], None],
        store: Store,
        idle_seconds: float,
    ) -> None:
        self._restore = restore
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
        try:
            answers = await asyncio.to_thread(self._store.resume_state.open_leaves, since)
            calls = await asyncio.to_thread(self._store.resume_state.unanswered_calls, max(since, now - RETRY_WINDOW))
        except StoreError as error:
            log.warning("event=linking_not_restored reason=%r", str(error))
            return False
        self._restore(answers, now, () if self._is_restored else calls)  # an attempt is repeated once
        self._is_restored = True
        return True

    async def stop(self) -> None:
        """Nothing to stop."""


def leaf_from_store(stored: OpenLeaf) -> Leaf:
    """Return the leaf of a stored answer."""
    return Leaf(
        trajectory_id=stored.trajectory_id,
        call_id=stored.call_id,
        choice=stored.choice,
        version=stored.version,
        link_key=stored.link_key,
        tool_call_ids=stored.tool_call_ids,
        key_id=stored.key_id,
        sequence=TokenFingerprint.of_ids(stored.sequence),
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
    return fingerprints_of(answer, "", answer_key, [_decode(body) for body in stored.prompt_messages])
