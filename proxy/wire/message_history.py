"""Messages with their nodes and link keys, read once: an agent sends its whole history again with every call.

A message that stands after the same messages as before, with the same bytes, is not parsed and not hashed again. What
comes out is shared between calls: nobody changes it. Memory is bounded: about `_MOST_BYTES` of messages as they were
sent, and two to three times that for what was made of them; what nobody sends any more goes. Any thread may ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ratchet.store.content import messages as canon
from ratchet.store.records import MessageNode

_MOST_BYTES = 2 * 2**20
_MOST_ONE = 2**18  # bytes; a larger message is read anew

_raws = msgspec.json.Decoder(list[Raw])
_message = msgspec.json.Decoder(dict[str, Any])


class HashedMessage(NamedTuple):
    """One message in its place."""

    message: dict[str, Any]
    node: MessageNode
    key: str


class MessageReader:
    """Remembers in two halves: when the young one is full it becomes the old one, and the old one goes."""

    def __init__(self, max_bytes: int = _MOST_BYTES) -> None:
        self._half = max_bytes // 2
        self._young: dict[tuple[str, bytes], HashedMessage] = {}
        self._old: dict[tuple[str, bytes], HashedMessage] = {}
        self._bytes = 0  # of the young half

    def read(self, raw: Raw) -> Sequence[HashedMessage]:
        """Return the messages of a JSON list, first message first. Raises msgspec.DecodeError."""
        found: list[HashedMessage] = []
        parent, key = canon.ROOT, canon.ROOT
        for one in _raws.decode(raw):
            said = self._said(parent, key, bytes(one))
            found.append(said)
            parent, key = said.node.hash, said.key
        return found

    def _said(self, parent: str, parent_key: str, data: bytes) -> HashedMessage:
        # The parent's hash covers all that was said before, the parent's link key with it.
        name = (parent, data)
        said = self._young.get(name)
        if said is None:
            said = self._old.get(name)
            if said is None:
                message = _message.decode(data)
                said = HashedMessage(message, canon.node(parent, message), canon.link_key(parent_key, message))
            if len(data) <= _MOST_ONE:
                self._keep(name, said, len(data))
        return said

    def _keep(self, name: tuple[str, bytes], said: HashedMessage, size: int) -> None:
        if self._bytes + size > self._half:
            self._old, self._young, self._bytes = self._young, {}, 0
        self._young[name] = said
        self._bytes += size + 200  # small messages take memory, too
