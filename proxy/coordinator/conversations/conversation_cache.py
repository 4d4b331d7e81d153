"""The conversations that `previous_response_id` continues: all messages up to a response and its answer.

Memory is bounded in bytes, in total and per key (`proxy/runtime/byte_quotas.py`). Above a limit, the key loses its
least recently used conversations, last response first; a turn stays as long as a later one needs it. Evicted turns,
and those of earlier processes and other proxies, are read from the store, where a response has its call's id. The store
does not distinguish the `instructions` of that call from a system message of its input: new instructions replace the
first system message.

A conversation that was deleted from the store cannot be continued, after about a second. Only the key that made a
response can continue it.
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
from ratchet.proxy.errors import NotFound, NotReady, not_looked_up
from ratchet.proxy.runtime.byte_quotas import ByteQuotas
from ratchet.store.errors import RecordNotFound, StoreError, StoreUnavailable
from ratchet.store.ids import moment
from ratchet.store.records import REDACTED, CallStarted
from ratchet.store.store import Store

ANSWER_SECONDS = 3.0  # for other proxies to ship a response that the client has
MAX_CONVERSATION_BYTES = 256 * 2**20  # of the turns that are kept; others are read from the store
_RECENT = 60.0  # seconds; even a busy proxy has usually shipped by then
_ID_LENGTH = len("resp_") + 26


class ConversationCache:
    """Turns by response id in the order of eviction: a turn comes after the turns that continue it."""

    def __init__(
        self,
        store: Store,
        lookups: RecordLookups,
        max_bytes: int = MAX_CONVERSATION_BYTES,
        max_bytes_per_key: int = MAX_CONVERSATION_BYTES // 2,
    ) -> None:
        self._store = store
        self._lookups = lookups
        self._turns: dict[str, ConversationTurn] = {}
        self._quotas: ByteQuotas[str] = ByteQuotas(max_bytes, max_bytes_per_key)
        self._invalidated: set[str] = set()  # turns that may have been deleted from the store
        self._lock = threading.Lock()  # large answers are added in threads

    @property
    def size(self) -> int:
        """The bytes of the cached turns."""
        return self._quotas.bytes

    def add_response(self, start: CallStarted, messages: Sequence[Json], previous: ConversationTurn | None) -> None:
        """Cache a response: the messages that it adds to `previous`, the answer included."""
        added = msgspec.json.encode(messages)
        names = start.trajectory_id, start.call_id, start.key_id, start.alias, start.purpose
        self._use(ConversationTurn(added, previous, *names))

    async def find_turn(self, name: str, key_id: str | None) -> ConversationTurn:
        """Return the turn of a response. Raises NotFound, NotReady."""
        turn = await self._find(name, key_id)
        self._use(turn)
        return turn

    async def find_items(self, names: Iterable[str], key_id: str | None) -> dict[str, Json]:
        """Return output items by id. Raises NotFound, NotReady."""
        outputs: dict[str, dict[str, Json]] = {}  # of each response, by position
        found: dict[str, Json] = {}
        for name in names:
            response, _, place = name.partition("_")[2].rpartition("_")
            try:
                if response not in outputs:
                    turn = await self._find(f"resp_{response}", key_id)
                    outputs[response] = _output(turn)
                    if turn.previous is None:  # a chain of turns is not walked for each of its items
                        self._use(turn)
                found[name] = outputs[response][place]
            except (NotFound, KeyError) as error:
                raise NotFound(f"the item {name[:80]!r} is not known: send the item itself", param="input") from error
        return found

    async def _find(self, name: str, key_id: str | None) -> ConversationTurn:
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
        return turn

    def invalidate_all(self) -> None:
        """Verify every cached turn in the store before its next use: records were deleted."""
        with self._lock:
            self._invalidated = set(self._turns)

    async def _stored(self, name: str, key_id: str | None) -> ConversationTurn | None:
        """Read a turn from the store; wait a little if another proxy may still have to ship it."""
        patience = ANSWER_SECONDS if is_recent(name) else 0.0
        ours = name in self._invalidated  # this proxy may still have to ship it
        try:
            turn, settled = await self._lookups.wait_for(
                lambda: self._read(name), key_id, patience, ours=ours, for_call=True
            )
        except StoreUnavailable as error:
            raise not_looked_up(f"previous response {name!r}", error) from error
        if turn is None and patience and not settled:
            raise NotReady(
                f"previous response {name!r} is not in the store yet, if another proxy or worker made it: retry"
            )
        return turn

    def _use(self, turn: ConversationTurn) -> None:
        """Move a turn and the turns before it to the end of the eviction order; evict above the limits."""
        with self._lock:
            for one in turn.back():
                name = response_id(one.call_id)
                before = self._turns.get(name)
                self._turns[name] = one
                self._quotas.add_use(one.key_id, name, one.size - (before.size if before else 0))
            while (excess := self._quotas.next_to_evict(turn.key_id)) is not None:
                evicted = self._turns.pop(excess)
                self._quotas.remove(evicted.key_id, excess, evicted.size)

    def _read(self, name: str) -> ConversationTurn | None:
        try:
            call = self._store.calls.read("call_" + name.removeprefix("resp_"))
            if not call.choices or call.dialect != "responses" or call.untrainable == REDACTED:
                return None
            messages = self._store.trajectories.messages_to(call.choices[0].reply_node)
            run = self._store.trajectories.get(call.trajectory_id)
        except RecordNotFound:
            return None
        except StoreError as error:
            raise not_looked_up(f"previous response {name!r}", error) from error
        names = call.trajectory_id, call.id, run.key_id, call.alias, run.purpose
        return ConversationTurn(msgspec.json.encode(messages), None, *names, rebuilt=True)


def _output(turn: ConversationTurn) -> dict[str, Json]:
    """Return the items of a turn's answer by position."""
    call_id = turn.call_id
    start = CallStarted(call_id, turn.trajectory_id, 0.0, "", 0, "responses", False, "", "")
    renderer = ResponseRenderer(start, {}, frozenset(), {})
    renderer.feed(
        {"choices": [message_to_delta({"message": decode_messages(turn.added)[-1], "finish_reason": "stop"})]}
    )
    renderer.finish()
    return {item["id"].rpartition("_")[2]: item for item in renderer.answer()["output"]}


def is_recent(name: str) -> bool:
    """Return whether a name is the id of a response of the last minute."""
    try:
        return len(name) == _ID_LENGTH and abs(time.time() - moment(name)) < _RECENT
    except ValueError:
        return False
