"""Stored responses and the responses before them: what `previous_response_id` continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ratchet.proxy.dialects.inner_request import Json
from ratchet.store.records import CallStarted

_OVERHEAD = 600  # bytes of a turn beside its messages: the record, its names, its entry in the table


decode_messages = msgspec.json.Decoder(list[Json]).decode


@dataclass(slots=True, frozen=True)
class ConversationTurn:
    """One response: the messages that its request added, its answer, and the turn before."""

    added: bytes  # JSON list
    previous: ConversationTurn | None
    trajectory_id: str
    call_id: str
    key_id: str | None
    alias: str
    purpose: str = "live"  # of its trajectory
    rebuilt: bool = False  # read from the store: `added` is the whole conversation, instructions included

    def conversation(self, *, has_instructions: bool) -> list[Json]:
        """Return the messages up to this turn.

        `has_instructions` means that the next request has instructions, which replace the stored ones.
        """
        chain = list(self.back())
        messages = [message for turn in reversed(chain) for message in decode_messages(turn.added)]
        if chain[-1].rebuilt and has_instructions and messages and messages[0]["role"] == "system":
            return messages[1:]
        return messages

    def back(self) -> Iterator[ConversationTurn]:
        """Yield this turn and the turns before it, newest first."""
        turn: ConversationTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    @property
    def size(self) -> int:
        """The bytes of this turn alone."""
        return len(self.added) + _OVERHEAD


class Conversations(Protocol):
    """The responses that a later request may continue or refer to."""

    async def find_turn(self, name: str, key_id: str | None) -> ConversationTurn:
        """Return the turn of a response id. Raises NotFound, NotReady."""

    async def find_items(self, names: Iterable[str], key_id: str | None) -> dict[str, Json]:
        """Return output items by id. Raises NotFound, NotReady."""

    def add_response(self, start: CallStarted, messages: Sequence[Json], previous: ConversationTurn | None) -> None:
        """Store a response: the messages that it adds to `previous`, the answer included."""
