"""Parses messages into nodes and link keys, with a cache: agents send their whole history with every call.

A message with the same bytes after the same messages is not parsed or hashed again. The results are shared between
calls and must not be changed. The cache holds about `_MAX_BYTES` of messages as sent, and two to three times that for
the parsed objects; unused entries are dropped. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ratchet.store.content import messages as canon
from ratchet.store.records import MessageNode

_MAX_BYTES = 2 * 2**20
_MAX_CACHED_MESSAGE = 2**18  # bytes; a larger message is not cached

_raws = msgspec.json.Decoder(list[Raw])
_message = msgspec.json.Decoder(dict[str, Any])


class HashedMessage(NamedTuple):
    """A message with the hash and link key of its path."""

    message: dict[str, Any]
    node: MessageNode
    key: str


class MessageReader:
    """The cache has two generations: when the current one is full, it replaces the previous one."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._generation_bytes = max_bytes // 2
        self._current: dict[tuple[str, bytes], HashedMessage] = {}
        self._previous: dict[tuple[str, bytes], HashedMessage] = {}
        self._bytes = 0  # of the current generation

    def read(self, raw: Raw) -> Sequence[HashedMessage]:
        """Return the messages of a JSON list, in order. Raises msgspec.DecodeError."""
        messages: list[HashedMessage] = []
        parent, key = canon.ROOT, canon.ROOT
        for one in _raws.decode(raw):
            message = self._message(parent, key, bytes(one))
            messages.append(message)
            parent, key = message.node.hash, message.key
        return messages

    def _message(self, parent: str, parent_key: str, data: bytes) -> HashedMessage:
        # The parent's hash covers all earlier messages, and so its link key.
        name = (parent, data)
        hashed = self._current.get(name)
        if hashed is None:
            hashed = self._previous.get(name)
            if hashed is None:
                message = _message.decode(data)
                hashed = HashedMessage(message, canon.node(parent, message), canon.link_key(parent_key, message))
            if len(data) <= _MAX_CACHED_MESSAGE:
                self._keep(name, hashed, len(data))
        return hashed

    def _keep(self, name: tuple[str, bytes], hashed: HashedMessage, size: int) -> None:
        if self._bytes + size > self._generation_bytes:
            self._previous, self._current, self._bytes = self._current, {}, 0
        self._current[name] = hashed
        self._bytes += size + 200  # overhead of a small message
