"""The cache of token ids of open answers: its bounds, what it evicts, and a store that hangs."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from ratchet.proxy.coordinator.conversations import token_contexts
from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.exact.splice import Context
from ratchet.proxy.messages.link_records import Leaf, token_fingerprint
from ratchet.store.records import CallEnded, CallStarted, Choice, pack_ids
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness.proxy.servers import until


def test_the_cache_of_ids_is_bounded_and_evicts_the_least_recently_used_first(store: Store) -> None:
    contexts = TokenContexts(store, max_bytes=6_000)  # an answer takes 1,000 bytes of ids and 500 for itself
    for number in range(10):
        contexts.add_answers(ended(f"call_{number}", 250))
    assert (len(contexts), contexts.bytes) == (4, 6_000)


async def test_few_ids_are_cached_until_one_is_read(store: Store) -> None:
    contexts = TokenContexts(store, max_bytes=2**24)
    for number in range(100):
        contexts.add_answers(ended(f"call_{number}", 10_000))
    assert contexts.bytes <= 2**20
    record = ended("call_99", 10_000)
    ids = record.prompt_ids + record.choices[0].token_ids
    leaf = Leaf.of("t", "call_99", 0, 0, b"", (), None, token_fingerprint(ids), 0.0)
    assert await contexts.find_context(leaf) == Context(ids, ((10, 10_000),)), "the latest are among them"
    for number in range(100, 200):
        contexts.add_answers(ended(f"call_{number}", 10_000))
    assert contexts.bytes > 100 * 40_000
    contexts.shrink()
    assert contexts.bytes <= 2**20


async def test_no_call_waits_long_for_a_store_that_hangs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    readings, go_on = list[str](), threading.Event()

    def hang(contexts: TokenContexts, trajectory_id: str, key: tuple[str, int]) -> None:
        readings.append(trajectory_id)
        go_on.wait(60)

    monkeypatch.setattr(TokenContexts, "_read", hang)
    monkeypatch.setattr(token_contexts, "_READ_SECONDS", 0.05)
    contexts, leaf = TokenContexts(store, max_bytes=2**20), Leaf.of("t", "call_1", 0, 0, b"", (), None, b"", 0.0)
    try:
        for _ in range(3):
            assert await asyncio.wait_for(contexts.find_context(leaf), 30) is None
        assert len(readings) == 1, "while a reading hangs, no other one begins"
    finally:
        go_on.set()
    await until(lambda: not contexts._late)
    await contexts.find_context(leaf)
    assert len(readings) == 2


async def test_ids_that_are_on_their_way_to_the_store_are_no_news(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    leaf = Leaf.of("traj_new", "call_1", 0, 0, b"", (), None, b"", 0.0)
    with caplog.at_level("DEBUG", "ratchet.proxy"):
        assert await TokenContexts(store, max_bytes=2**20).find_context(leaf) is None
    levels = [record.levelname for record in caplog.records if "event=context_not_read" in record.getMessage()]
    assert levels == ["DEBUG"]


def test_ids_that_were_continued_are_evicted_first(store: Store) -> None:
    contexts = TokenContexts(store, max_bytes=4_500)
    for number in (1, 2):
        contexts.add_answers(ended(f"call_{number}", 100))
    continuation = ended("call_3", 100)
    start = msgspec.structs.replace(continuation.start, parent_call="call_2")
    contexts.add_answers(msgspec.structs.replace(continuation, start=start, context="exact"))
    for number in (4, 5):
        contexts.add_answers(ended(f"call_{number}", 100))
    assert [number for number in range(1, 6) if (f"call_{number}", 0) in contexts] == [1, 3, 4, 5]


def ended(name: str, ids: int) -> CallEnded:
    """Return the record of a call with so many ids."""
    start = CallStarted(call_id=name, trajectory_id="t", started_at=0.0, alias="a", version=0, dialect="chat",
                      streamed=False, linked_by="root", prompt_node="")  # fmt: skip
    choice = Choice(index=0, finish_reason="stop", token_ids=pack_ids(range(ids - 10)), logprobs=b"")
    return CallEnded(start=start, state=CallState.ANSWERED, ended_at=0.0, status=200, prompt_ids=pack_ids(range(10)),
                     choices=(choice,))  # fmt: skip
