"""A stored response and the responses before it: what `previous_response_id` continues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ratchet.proxy.dialects.inner_request import Json

_OVERHEAD = 600  # bytes of a turn beside its messages: the record, its names, its place in the table


_messages = msgspec.json.Decoder(list[Json])


@dataclass(slots=True, frozen=True)
class ConversationTurn:
    """One response: the messages that its request added, its answer, and the turn before."""

    added: bytes  # JSON list
    previous: ConversationTurn | None
    trajectory_id: str
    call_id: str
    key_id: str | None
    rebuilt: bool = False  # from the store; holds the whole conversation, its instructions too

    def conversation(self, *, instructed: bool) -> list[Json]:
        """Return its messages; `instructed` says that the coming request has instructions of its own."""
        chain = list(self.back())
        messages = [message for one in reversed(chain) for message in _messages.decode(one.added)]
        if chain[-1].rebuilt and instructed and messages and messages[0]["role"] == "system":
            return messages[1:]
        return messages

    def back(self) -> Iterator[ConversationTurn]:
        """Yield this turn and those before it, the newest first."""
        turn: ConversationTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    @property
    def size(self) -> int:
        """Return the bytes that it takes by itself."""
        return len(self.added) + _OVERHEAD
