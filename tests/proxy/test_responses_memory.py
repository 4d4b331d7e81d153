"""The cache of responses: shared history is counted once, and the least recently used is evicted first."""

from __future__ import annotations

import asyncio
import gc

import pytest

from ratchet.proxy.coordinator.conversations.conversation_cache import ConversationCache
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.dialects.conversation import ConversationTurn
from ratchet.proxy.dialects.responses_renderer import response_id
from ratchet.proxy.errors import NotFound
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory, call_start

LIMIT = 50_000


def add_response(
    memory: ConversationCache, number: int, previous: ConversationTurn | None, size: int = 1000
) -> ConversationTurn:
    """Add a response with `size` characters; return its turn, even if it was evicted at once."""
    call = call_start(f"call_{number}", "t1", key_id="k1")
    memory.add_response(call, [{"role": "user", "content": "x" * size}], previous)
    return ConversationTurn(b"", previous, "t1", call.call_id, "k1", "agent")


def turns_alive() -> list[ConversationTurn]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is ConversationTurn]


def bytes_held(others: list[ConversationTurn]) -> int:
    """Return the bytes of all turns in this process except those of other tests, each counted once."""
    left = set(map(id, others))
    return sum(len(one.added) for one in turns_alive() if id(one) not in left)


@pytest.mark.slow
@pytest.mark.parametrize(("chains", "turns"), [(1, 40), (7, 20)])
def test_conversations_never_hold_more_than_the_limit(store: Store, chains: int, turns: int) -> None:
    memory = ConversationCache(store, RecordLookups(store), LIMIT, LIMIT)
    others = turns_alive()
    for chain in range(chains):
        last: ConversationTurn | None = None
        for number in range(turns):
            name = response_id(add_response(memory, 100 * chain + number, last).call_id)
            try:
                last = asyncio.run(memory.find_turn(name, "k1"))
            except NotFound:  # this conversation alone exceeds the limit
                assert chains == 1
                break
            assert memory.size <= LIMIT
        last = None
        assert bytes_held(others) <= memory.size <= LIMIT
    assert memory.size > LIMIT / 2


def test_the_least_recently_used_conversation_is_evicted_and_others_stay_whole(store: Store) -> None:
    memory = ConversationCache(store, RecordLookups(store), LIMIT, LIMIT)
    lasts: list[str] = []
    for chain in range(3):
        last: ConversationTurn | None = None
        for number in range(10):
            name = response_id(add_response(memory, 100 * chain + number, last).call_id)
            last = asyncio.run(memory.find_turn(name, "k1"))
        lasts.append(name)
    asyncio.run(memory.find_turn(lasts[0], "k1"))
    add_response(memory, 900, None)
    with pytest.raises(NotFound):
        asyncio.run(memory.find_turn(lasts[1], "k1"))
    for name in (lasts[0], lasts[2]):
        assert len(asyncio.run(memory.find_turn(name, "k1")).conversation(has_instructions=False)) == 10


def test_a_conversation_read_back_from_the_store_is_counted_once(store: Store) -> None:
    answered_trajectory(store, "t9", dialect="responses", key_id="k1")
    memory = ConversationCache(store, RecordLookups(store), LIMIT, LIMIT)
    call = store.trajectories.read("t9").calls[0]
    for _ in range(5):
        asyncio.run(memory.find_turn(response_id(call.id), "k1"))
    once = memory.size
    assert once > 0
    add_response(memory, 1, asyncio.run(memory.find_turn(response_id(call.id), "k1")))
    assert memory.size > once + 1000


def test_another_keys_conversation_is_not_known(store: Store) -> None:
    memory = ConversationCache(store, RecordLookups(store), LIMIT, LIMIT)
    add_response(memory, 1, None)
    with pytest.raises(NotFound):
        asyncio.run(memory.find_turn("resp_1", "k2"))
