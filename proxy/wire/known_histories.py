"""Recognizes a message list whose beginning was read before, and remembers what was read, without its content.

An agent sends its whole history with every call. An earlier list of the same API key is recognized at the beginning of
a longer one by a keyed digest of its bytes. Of each message its hash and link key are kept, and of an assistant's its
answer digest: about 210 bytes a message. Memory is bounded. A beginning that was continued is dropped first. Any thread
may call.

Lists in a format other than that of the usual JSON encoders are not recognized, and are parsed as a whole.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from blake3 import blake3

_MAX_ENDS = 12  # positions that are tried
_MAX_OBJECTS = 40  # that are looked at for them
_DIGEST_BYTES = 16
_ENTRY_BYTES, _MESSAGE_BYTES = 400, 208  # estimates; a test measures them
_MAX_BYTES = 20 * 2**20  # about 1,200 agents whose histories have 80 messages

Name = tuple[str, int, bytes]  # (key id, length, digest)


class MessageTraits(NamedTuple):
    """What messages contain, for readers that then need not parse them."""

    untrainable: str | None = None  # the kind of the first part that is not text
    has_other_system: bool = False  # a `developer`, or a system message that is not the first message
    only_text: bool = True  # no content is a list
    has_escapes: bool = False  # a printable ASCII character may be written as `\u00..`
    depth: int = 0  # the levels of their JSON, at most
    leading_system: int = 0  # number of system and developer messages at the beginning
    plain_tool_calls: bool = True  # those of assistant messages have the standard form

    def of_list(self, depth: int, *, has_escapes: bool) -> MessageTraits:
        """Return the traits of a list, from those of its messages, whose depth and escapes are not known."""
        return MessageTraits(
            self.untrainable,
            self.has_other_system,
            self.only_text,
            has_escapes,
            depth,
            self.leading_system,
            self.plain_tool_calls,
        )

    def joined(self, length: int, later: MessageTraits) -> MessageTraits:
        """Return the traits of these messages, so many, and later ones."""
        return MessageTraits(
            self.untrainable or later.untrainable,
            self.has_other_system or later.has_other_system or later.leading_system > 0,
            self.only_text and later.only_text,
            self.has_escapes or later.has_escapes,
            max(self.depth, later.depth),
            self.leading_system + (later.leading_system if self.leading_system == length else 0),
            self.plain_tool_calls and later.plain_tool_calls,
        )


class KnownHistory(NamedTuple):
    """What is kept of a message list."""

    hashes: tuple[str, ...]
    keys: tuple[str, ...]  # link keys
    answer_digests: bytes  # of the assistant messages, one after the other
    traits: MessageTraits


class KnownBeginning(NamedTuple):
    """What is known of a message list, and the names of the list and of its beginnings."""

    name: Name
    known: KnownHistory | None = None
    known_name: Name | None = None
    shorter: Name | None = None  # up to the position before the last one where a message may end

    @property
    def end(self) -> int:
        """Where the known messages end."""
        return self.known_name[1] if self.known_name else 0

    def without_last(self, messages: bytes, last: bytes) -> KnownBeginning | None:
        """Return the list without its last message; None if that does not end where one was looked for."""
        if self.shorter is None:
            return None
        between = messages[self.shorter[1] : self.name[1] - len(last)]
        return KnownBeginning(self.shorter) if between.strip() == b"," else None


class KnownHistories:
    """The histories that were read most recently."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(32)  # no client can make two beginnings with one digest
        self._histories: OrderedDict[Name, KnownHistory] = OrderedDict()  # the next one to drop first
        self._counts: dict[tuple[str, int], int] = {}  # histories by key id and length: no digest is made in vain
        self._lock = Lock()
        self.bytes = 0  # estimated

    def __len__(self) -> int:
        return len(self._histories)

    def __contains__(self, name: object) -> bool:
        return name in self._histories

    def find(self, messages: bytes, key_id: str) -> KnownBeginning:
        """Return the longest known beginning of a JSON list of objects."""
        ends = _ends(messages)
        view, at, hashed = memoryview(messages), 0, blake3(key=self._secret)
        names: list[Name] = []
        for end in reversed(ends):
            if end in ends[:2] or (key_id, end) in self._counts:
                hashed.update(view[at:end])
                at = end
                names.append((key_id, end, hashed.digest(_DIGEST_BYTES)))
        for name in reversed(names):
            if known := self._histories.get(name):
                return KnownBeginning(names[-1], known, name)
        return KnownBeginning(names[-1], shorter=names[-2] if len(names) > 1 else None)

    def add(self, beginning: KnownBeginning, history: KnownHistory) -> None:
        """Remember a list that was read. The beginning that it continues is the next one to be dropped."""
        name, continued = beginning.name, beginning.known_name
        with self._lock:
            if name not in self._histories:
                self.bytes += _size(history)
                self._counts[name[:2]] = self._counts.get(name[:2], 0) + 1
            self._histories[name] = history
            self._histories.move_to_end(name)
            if continued is not None and continued != name and continued in self._histories:
                self._histories.move_to_end(continued, last=False)
            while self.bytes > self._max_bytes:
                self._drop(*self._histories.popitem(last=False))

    def _drop(self, name: Name, history: KnownHistory) -> None:
        self.bytes -= _size(history)
        self._counts[name[:2]] -= 1
        if not self._counts[name[:2]]:
            del self._counts[name[:2]]


def _ends(messages: bytes) -> list[int]:
    """Return where messages may end, the last one first."""
    ends = [messages.rfind(b"}") + 1]
    at = ends[0]
    for _ in range(_MAX_OBJECTS):
        at = messages.rfind(b'{"', 0, at)
        if at < 3 or len(ends) == _MAX_ENDS:
            break
        if messages.startswith(b"},", at - 2):
            ends.append(at - 1)
        elif messages.startswith(b"}, ", at - 3):
            ends.append(at - 2)
    return ends


def _size(history: KnownHistory) -> int:
    return _ENTRY_BYTES + _MESSAGE_BYTES * len(history.hashes)
