"""What `previous_response_id` stands for: the conversation up to and with a response.

Bounded in bytes, in all and per key (`proxy/runtime/byte_quotas.py`): of who holds too much the conversations used
longest ago are
forgotten first, from their last response back; a turn is counted as long as a later one stands on it. A forgotten one,
one from before a restart and one that another proxy made is read back from the store, where a response's id is its
call's. There the `instructions` of that call cannot be told from a system message of its input: new instructions take
the place of the first system message, else it stays.

What was deleted from the store is not gone on from, a second or so later at most.

A response is known only to the key that it was made with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import msgspec

from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.dialects.content_blocks import message_to_delta
from ratchet.proxy.dialects.conversation import ConversationTurn, decode_messages
from ratchet.proxy.dialects.inner_request import Json
from ratchet.proxy.dialects.responses_renderer import ResponseRenderer, response_id
from ratchet.proxy.errors import NotFound, NotReady
from ratchet.proxy.runtime.byte_quotas import ByteQuotas
from ratchet.store.errors import RecordNotFound, StoreError, StoreUnavailable
from ratchet.store.ids import moment
from ratchet.store.records import REDACTED, CallStarted
from ratchet.store.store import Store

ANSWER_SECONDS = 3.0  # for other proxies to ship a response that a client has already
_RECENT = 60.0  # seconds in which they usually have, however busy
_ID_LENGTH = len("resp_") + 26


class ConversationCache:
    """Turns by response id, the first to be forgotten first: no turn comes before one that stands on it."""

    def __init__(self, store: Store, lookups: RecordLookups, max_bytes: int, max_bytes_per_key: int) -> None:
        self._store = store
        self._lookups = lookups
        self._turns: dict[str, ConversationTurn] = {}
        self._quotas: ByteQuotas[str] = ByteQuotas(max_bytes, max_bytes_per_key)
        self._invalidated: set[str] = set()  # they may have been deleted from the store
        self._lock = threading.Lock()  # large answers are told in threads

    @property
    def size(self) -> int:
        """Return the bytes that the remembered turns take."""
        return self._quotas.bytes

    def add_response(self, start: CallStarted, messages: Sequence[Json], previous: ConversationTurn | None) -> None:
        """Remember a response: its new messages, answer included, after those of `previous`."""
        self._use(
            ConversationTurn(msgspec.json.encode(messages), previous, start.trajectory_id, start.call_id, start.key_id)
        )

    async def find_turn(self, name: str, key_id: str | None) -> ConversationTurn:
        """Return the turn of a response. Raises NotFound, NotReady."""
        turn = self._turns.get(name)
        if turn is None or name in self._invalidated:
            stored = await self._stored(name, key_id)
            turn = turn if turn and stored else stored
        if turn is None or turn.key_id != key_id:
            raise NotFound(
                f"previous response {name!r} is not known: send its conversation as `input`",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._invalidated.discard(name)
        self._use(turn)
        return turn

    async def find_items(self, names: Iterable[str], key_id: str | None) -> dict[str, Json]:
        """Return items of answers by the ids that they were told with. Raises NotFound, NotReady."""
        found: dict[str, Json] = {}
        for name in names:
            made, _, place = name.partition("_")[2].rpartition("_")
            try:
                turn = await self.find_turn(f"resp_{made}", key_id)
                found[name] = _output(turn)[place]
            except (NotFound, KeyError) as error:
                raise NotFound(f"the item {name[:80]!r} is not known: send it whole", param="input") from error
        return found

    def invalidate_all(self) -> None:
        """Something was deleted: what is remembered is looked for in the store before it is gone on from."""
        with self._lock:
            self._invalidated = set(self._turns)

    async def _stored(self, name: str, key_id: str | None) -> ConversationTurn | None:
        """Return a turn as the store has it; one that another proxy made just now may still be on its way there."""
        patience = ANSWER_SECONDS if is_recent(name) else 0.0
        ours = name in self._invalidated  # and perhaps still on its way
        try:
            turn, _ = await self._lookups.wait_for(lambda: self._read(name), key_id, patience, ours=ours, for_call=True)
        except StoreUnavailable as error:
            raise NotReady(f"previous response {name!r} cannot be looked up: {error}") from error
        return turn

    def _use(self, turn: ConversationTurn) -> None:
        """Make a turn, and all that it stands on, the last to be forgotten; forget what is too much."""
        with self._lock:
            for one in turn.back():
                name = response_id(one.call_id)
                before = self._turns.get(name)
                self._turns[name] = one
                self._quotas.add_use(one.key_id, name, one.size - (before.size if before else 0))
            while (excess := self._quotas.next_to_evict(turn.key_id)) is not None:
                forgotten = self._turns.pop(excess)
                self._quotas.remove(forgotten.key_id, excess, forgotten.size)

    def _read(self, name: str) -> ConversationTurn | None:
        try:
            call = self._store.calls.read("call_" + name.removeprefix("resp_"))
            if not call.choices or call.dialect != "responses" or call.untrainable == REDACTED:
                return None
            messages = self._store.trajectories.messages_to(call.choices[0].reply_node)
            key_id = self._store.trajectories.get(call.trajectory_id).key_id
        except RecordNotFound:
            return None
        except StoreError as error:
            raise NotReady(f"previous response {name!r} cannot be looked up: {error}") from error
        return ConversationTurn(msgspec.json.encode(messages), None, call.trajectory_id, call.id, key_id, rebuilt=True)


def _output(turn: ConversationTurn) -> dict[str, Json]:
    """Return the items of a turn's answer by their places in it."""
    call_id = turn.call_id
    start = CallStarted(call_id, turn.trajectory_id, 0.0, "", 0, "responses", False, "", "")
    teller = ResponseRenderer(start, {}, frozenset(), {})
    teller.feed({"choices": [message_to_delta({"message": decode_messages(turn.added)[-1], "finish_reason": "stop"})]})
    teller.finish()
    return {item["id"].rpartition("_")[2]: item for item in teller.answer()["output"]}


def is_recent(name: str) -> bool:
    """Return whether a name is a response's that was made within the last minute."""
    try:
        return len(name) == _ID_LENGTH and abs(time.time() - moment(name)) < _RECENT
    except ValueError:
        return False
