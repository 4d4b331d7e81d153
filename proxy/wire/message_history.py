"""Parses messages into nodes and link keys, and only those that are new: agents send their whole history every time.

A long list whose beginning is known (`known_histories.py`) is parsed from there on; its earlier messages when one of
them is asked for. Of other lists, a message with the same bytes after the same messages is not parsed or hashed again:
the cache holds about `_MAX_BYTES` of messages as sent, and two to three times that for the parsed objects; unused
entries are dropped. Of a long list that is new, few messages enter it: keeping 80 that are not sent again costs a
sixth of reading them. The results are shared between calls and must not be changed. Any thread may call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ratchet.proxy.wire.known_histories import KnownHistories, KnownHistory, MessageTraits
from ratchet.proxy.wire.lazy_sequence import LazySequence
from ratchet.store.content import json_depth
from ratchet.store.content import messages as canon
from ratchet.store.records import MessageNode

_MAX_BYTES = 2 * 2**20
_MAX_CACHED_MESSAGE = 2**18  # bytes; a larger message is not cached
_LONG = 12 * 1024  # bytes; for a shorter list it is not worth looking for a known beginning

_ANY_DEPTH = 2**31  # of messages whose depth was not asked for

_ORDINARY = MessageTraits()
_shared_traits = lru_cache(maxsize=64)(MessageTraits)  # equal traits are one object
_NON_TEXT_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file")

# All JSON encoders write these characters the same way, unless they write `\u00..`.
_PLAIN_TEXT = re.compile(r"[ -.0-~\n\r\t]{2,}")
_ESCAPED_TEXT = re.compile(rb"\\u00(?:[2-7]|0[9aAdD])")

_raws = msgspec.json.Decoder(list[Raw])
_message = msgspec.json.Decoder(dict[str, Any])
_messages = msgspec.json.Decoder(list[dict[str, Any]])
_encode = msgspec.json.Encoder().encode

Message = dict[str, Any]


class MayExceedLimits(Exception):
    """The list is longer than allowed, or a part of it that is not known is deeper."""


class ListLimits(NamedTuple):
    """What a list may have: messages, and levels of JSON, its own included."""

    messages: int
    depth: int


class HashedMessage(NamedTuple):
    """A message with the hash and link key of its path, of an assistant's its answer digest, and its traits."""

    message: Message
    node: MessageNode
    key: str
    answer_digest: bytes
    traits: MessageTraits


class History(NamedTuple):
    """The messages of a request with their nodes, the nodes' hashes and the link keys.

    `data`: the JSON of a long list, else empty.
    """

    messages: Sequence[Message]
    nodes: Sequence[MessageNode]
    hashes: tuple[str, ...]
    keys: tuple[str, ...]
    answer_digests: bytes  # of the assistant messages, one after the other
    traits: MessageTraits
    data: bytes = b""

    def summary(self) -> KnownHistory:
        """Return what is cached of it."""
        return KnownHistory(self.hashes, self.keys, self.answer_digests, self.traits)

    def may_contain(self, text: str) -> bool:
        """Return False if no message contains a text, as far as is known without parsing them."""
        if not self.data or not self.traits.only_text or self.traits.has_escapes:
            return True
        plain = max(_PLAIN_TEXT.findall(text), key=len, default="")
        return _encode(plain)[1:-1] in self.data


class MessageReader:
    """The cache has two generations: when the current one is full, it replaces the previous one."""

    def __init__(self, max_bytes: int = _MAX_BYTES, known: KnownHistories | None = None) -> None:
        self._generation_bytes = max_bytes // 2
        self._current: dict[tuple[str, bytes], HashedMessage] = {}
        self._previous: dict[tuple[str, bytes], HashedMessage] = {}
        self._bytes = 0  # of the current generation
        self._known = known or KnownHistories()

    def read(self, raw: Raw, key_id: str = "", limits: ListLimits | None = None) -> History:
        """Return the messages of a valid JSON list.

        Raises MayExceedLimits; msgspec.DecodeError for a list of anything but objects.
        """
        data = bytes(raw)
        if len(data) >= _LONG:
            return self._read_long(data, key_id, limits)
        sent = _items(data)
        depth = _checked_depth(sent, limits)
        return _history(self._read_all(sent, is_long=False), depth)

    def _read_long(self, data: bytes, key_id: str, limits: ListLimits | None) -> History:
        beginning = self._known.find(data, key_id)
        known = beginning.known
        if known is not None and (limits is None or known.traits.depth <= limits.depth):
            new = b"[" + data[beginning.end :].lstrip().removeprefix(b",")
            history = _continued(known, new, limits, data)
        else:
            sent = _items(data)
            depth = _checked_depth(sent, limits)
            hashed, has_escapes = self._read_all(sent, is_long=True), _has_escapes(data)
            history = _history(hashed, depth, has_escapes=has_escapes)._replace(data=data)
            shorter = beginning.without_last(data, sent[-1]) if len(sent) > 1 else None
            if shorter is not None:  # agents add a reminder to the last message, and remove it again
                self._known.add(shorter, _history(hashed[:-1], depth, has_escapes=has_escapes).summary())
        if history.hashes:
            self._known.add(beginning, history.summary())
        return history

    def _read_all(self, sent: Sequence[bytes], *, is_long: bool) -> list[HashedMessage]:
        """Return the messages of a list of which nothing is known.

        After a message that is not cached, no later one is looked up. Of a long list one more new message is cached
        than were found: a beginning that every call repeats is cached after a few calls.
        """
        hashed: list[HashedMessage] = []
        parent, key, found = canon.ROOT, canon.ROOT, 0
        for place, data in enumerate(sent):
            one = self._cached(parent, data) if place == found else None
            if one is not None:
                found += 1
            else:
                one = _hashed(parent, key, _message.decode(data))
                if not is_long or place <= 2 * found:
                    self._keep(parent, data, one)
            hashed.append(one)
            parent, key = one.node.hash, one.key
        return hashed

    def _cached(self, parent: str, data: bytes) -> HashedMessage | None:
        # The parent's hash covers all earlier messages, and so its link key.
        hashed = self._current.get((parent, data))
        if hashed is None and (hashed := self._previous.get((parent, data))) is not None:
            self._keep(parent, data, hashed)
        return hashed

    def _keep(self, parent: str, data: bytes, hashed: HashedMessage) -> None:
        size = len(data)
        if size > _MAX_CACHED_MESSAGE:
            return
        if self._bytes + size > self._generation_bytes:
            self._previous, self._current, self._bytes = self._current, {}, 0
        self._current[parent, data] = hashed
        self._bytes += size + 200  # overhead of a small message


def _hashed(parent: str, parent_key: str, message: Message) -> HashedMessage:
    # All that is derived from a message is derived at once, while the processor's cache has it.
    return HashedMessage(message, *canon.hashed(parent, parent_key, message), _traits(message))


def _items(data: bytes) -> list[bytes]:
    return [bytes(raw) for raw in _raws.decode(data)]


def _checked_depth(sent: Sequence[bytes], limits: ListLimits | None) -> int:
    """Return the levels of JSON of a list with these items, or more. Raises MayExceedLimits."""
    if limits is None:
        return _ANY_DEPTH
    if len(sent) > limits.messages:
        raise MayExceedLimits
    depth = 1 + max([json_depth.depth_bound(one, limits.depth - 1) for one in sent], default=0)
    if depth > limits.depth:
        raise MayExceedLimits
    return depth


def _history(hashed: Sequence[HashedMessage], depth: int, *, has_escapes: bool = False) -> History:
    messages, nodes, keys, digests, each = zip(*hashed, strict=True) if hashed else ((),) * 5
    traits = last = each[0] if each else _ORDINARY
    for place, one in enumerate(each):
        if one is not _ORDINARY and (one is not last or (place and one.leading_system)):  # else nothing changes
            traits, last = traits.joined(place, one), one
    traits = traits.of_list(depth, has_escapes=has_escapes)
    return History(messages, nodes, tuple([node.hash for node in nodes]), keys, b"".join(digests), traits)


def _continued(known: KnownHistory, new: bytes, limits: ListLimits | None, data: bytes) -> History:
    """Return the history of `data`: known messages, and the list `new` after them. Raises MayExceedLimits."""
    hashed: list[HashedMessage] = []
    parent, key = known.hashes[-1], known.keys[-1]
    sent = _items(new)
    depth = _checked_depth(sent, limits)
    for item in sent:
        one = _hashed(parent, key, _message.decode(item))
        hashed.append(one)
        parent, key = one.node.hash, one.key
    later, count = _history(hashed, depth, has_escapes=_has_escapes(new)), len(known.hashes)
    return History(
        LazySequence(count, later.messages, lambda: _messages.decode(data)),
        LazySequence(count, later.nodes, lambda: canon.path(_messages.decode(data))),
        known.hashes + later.hashes,
        known.keys + later.keys,
        known.answer_digests + later.answer_digests,
        known.traits.joined(count, later.traits),
        data,
    )


def _has_escapes(data: bytes) -> bool:
    return b"\\u00" in data and _ESCAPED_TEXT.search(data) is not None


def _traits(message: Message) -> MessageTraits:
    """Return the traits of one message, without its depth and escapes."""
    role, content = message.get("role"), message.get("content")
    is_system, parts = role in canon.SYSTEM_ROLES, content if isinstance(content, list) else None
    is_plain = role != "assistant" or _has_plain_tool_calls(message)
    if is_plain and not is_system and parts is None:
        return _ORDINARY
    return _shared_traits(
        untrainable=_non_text_part(parts or ()),
        has_other_system=role == "developer",
        only_text=parts is None,
        leading_system=int(is_system),
        plain_tool_calls=is_plain,
    )


def _has_plain_tool_calls(message: Message) -> bool:
    """Return whether an assistant message's tool calls have the standard form."""
    calls = message.get("tool_calls")
    if calls is None:
        return True
    return isinstance(calls, list) and all(map(_is_plain_tool_call, calls))


def _is_plain_tool_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _non_text_part(content: Sequence[Any]) -> str | None:
    """Return the kind of the first part that is not text, as the reason why the call is not trained."""
    for part in content:
        if isinstance(part, dict) and part.get("type") in _NON_TEXT_PARTS:
            return "image" if "image" in str(part["type"]) else str(part["type"])
    return None
