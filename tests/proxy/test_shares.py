"""Byte quotas: in total and per key. The key that holds most is evicted from first; no other key loses anything."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ratchet.proxy.api_keys import hash_key
from ratchet.proxy.coordinator.conversations.conversation_cache import ConversationCache
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.unanswered_attempts import RETRY_WINDOW, UnansweredAttempts
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.dialects.responses_renderer import response_id
from ratchet.proxy.errors import NotFound
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import fingerprints_of, short_key
from ratchet.proxy.runtime.byte_quotas import ByteQuotas
from ratchet.proxy.settings import ProxySettings
from ratchet.store import ids
from ratchet.store.content import messages as canon
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.servers import eventually
from tests.harness.records import call_start
from tests.proxy.test_linking import NEXT, USER, Message, evidence, tool_reply

HOSTILE, OTHER = "0123456789abcdef", "fedcba9876543210"


def test_the_key_that_holds_most_loses_its_least_recently_used_entry() -> None:
    quotas: ByteQuotas[str] = ByteQuotas(1000, 600)
    for number in range(10):
        quotas.add_use(HOSTILE, f"h{number}", 50)
    quotas.add_use(OTHER, "o", 300)
    assert quotas.next_to_evict(OTHER) is None
    quotas.add_use(HOSTILE, "h0", 150)  # 650 of 600, and used last
    assert quotas.next_to_evict(HOSTILE) == "h1"
    quotas.remove(HOSTILE, "h1", 50)
    quotas.add_use(OTHER, "o2", 150)
    assert quotas.next_to_evict(OTHER) == "h2"  # all hold 1,050 of 1,000
    quotas.remove(HOSTILE, "h2", 50)
    assert (quotas.bytes, quotas.bytes_of(HOSTILE), quotas.bytes_of(OTHER), quotas.next_to_evict(OTHER)) == (
        1000,
        550,
        450,
        None,
    )
    for name in ("o", "o2"):
        quotas.remove(OTHER, name, 1)
    assert (quotas.bytes, quotas.bytes_of(OTHER)) == (550, 0)


def call(linker: TrajectoryLinker, messages: list[Message], reply: Message, key: str) -> Link:
    """Link and end a call of this key with this answer."""
    link = linker.find_link(evidence(messages, key))
    linker.begin_call(link, "agent", 0, 1.0)
    keys = canon.link_keys(messages)
    own, path, gap = canon.answer_keys((canon.ANYWHERE, keys[-1], keys[-2] if len(keys) > 1 else ""), reply)
    leaf = Leaf.of(
        link.trajectory_id, ids.new_id("call"), 0, 0, short_key(path), canon.tool_call_ids(reply), key,
        token_fingerprint(uuid.uuid4().bytes), 1.0, fingerprints=fingerprints_of(reply, gap, own, messages),
    )  # fmt: skip
    linker.end_call(link, [leaf], 1.0)
    return link


def own_reply(number: int) -> Message:
    arguments = json.dumps({name: f"{number} {uuid.uuid4().hex * 30}" for name in "ab"})
    return tool_reply(arguments, f"chatcmpl-tool-{uuid.uuid4().hex}", content=f"{uuid.uuid4().hex} and so on" * 9)


REPLIES: dict[str, Callable[[int], Message]] = {
    "short": lambda number: {"role": "assistant", "content": f"ok {number}"},
    "tool calls": own_reply,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPLIES)
def test_a_hostile_key_fills_its_share_and_another_keys_trajectories_stay_linked(kind: str) -> None:
    most, mine = 4 * 2**20, [{**USER, "content": f"mine {number}"} for number in range(20)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    linker = TrajectoryLinker(900, most, most)
    reply = {"role": "assistant", "content": "done"}
    theirs = [call(linker, [message], reply, OTHER) for message in mine]
    for number in range(6000):
        call(linker, [{**USER, "content": f"fill {number}"}], REPLIES[kind](number), HOSTILE)
        assert linker.bytes <= most
    gc.collect()
    real = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert most * 0.95 < linker.bytes
    assert 0.75 < real / linker.bytes < 1.25
    for message, first in zip(mine, theirs, strict=True):
        found = linker.find_link(evidence([message, reply, NEXT], OTHER))
        assert (found.trajectory_id, found.linked_by) == (first.trajectory_id, "graph")
    last = [{**USER, "content": "fill 5999"}]
    assert linker.find_link(evidence(last, HOSTILE)).linked_by == "root"


@pytest.mark.slow
def test_a_key_stays_within_its_quota_although_the_total_has_space() -> None:
    linker = TrajectoryLinker(900, 2**22, 2**19)
    for number in range(3000):
        call(linker, [{**USER, "content": f"fill {number}"}], own_reply(number), HOSTILE)
    assert 0.9 * 2**19 < linker.bytes <= 2**19


def test_runs_with_a_running_call_are_not_evicted() -> None:
    linker = TrajectoryLinker(900, 2**17, 2**17)
    link = linker.find_link(evidence([USER], HOSTILE))
    linker.begin_call(link, "agent", 3, 1.0)
    for number in range(500):
        call(linker, [{**USER, "content": f"fill {number}"}], own_reply(number), HOSTILE)
    assert linker.count_pins(2.0, 30)["agent@3"] == 1


def test_unanswered_attempts_are_bounded_per_key_and_expire() -> None:
    attempts, link = UnansweredAttempts(2**18, 2**17), Link("traj_1", 0, "root")
    mine = AttemptKey("agent", OTHER, "b2:mine", "")
    attempts.add(mine, link, 1.0)
    for number in range(5000):
        attempts.add(AttemptKey("agent", HOSTILE, f"b2:{number % 900}", ""), link, 1.0)
    assert 2**16 < attempts.bytes <= 2**17 + 1000
    assert attempts.take(mine, 0.0) is link
    for _ in range(2000):
        attempts.add(AttemptKey("agent", HOSTILE, "b2:late", ""), link, RETRY_WINDOW + 2.0)
    assert len(attempts) == 64
    assert attempts.bytes == len(attempts) * 800


def test_a_hostile_key_evicts_only_its_own_conversations(store: Store) -> None:
    memory = ConversationCache(store, RecordLookups(store), 200_000, 150_000)

    def keep(number: int, key: str) -> str:
        made = call_start(f"call_{number}", "t1", key_id=key)
        memory.add_response(made, [{"role": "user", "content": "x" * 1000}], None)
        return response_id(made.call_id)

    mine = [keep(number, OTHER) for number in range(20)]
    theirs = [keep(100 + number, HOSTILE) for number in range(500)]
    assert 140_000 < memory.size <= 200_000
    for name in mine:
        assert asyncio.run(memory.find_turn(name, OTHER)).key_id == OTHER
    with pytest.raises(NotFound):
        asyncio.run(memory.find_turn(theirs[0], HOSTILE))


def ask(url: str, key: str, size: int, wait: str = "") -> httpx.Response:
    body = {"model": "agent", "messages": [{"role": "user", "content": "x" * size + f" hello{wait}"}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


@pytest.mark.slow
def test_inflight_bodies_are_bounded_per_key_and_in_total(start: Start) -> None:
    hashes = frozenset(hash_key(key.encode()) for key in ("a", "b", "c"))
    proxy = start(
        key_hashes=hashes, max_body_bytes=600_000, max_inflight_request_bytes=1_400_000,
        exact_context="off",
    )  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, proxy.url, key, 480_000, "#wait=3") for key in ("a", "b")]
        metric = 'ratchet_memory_bytes{component="requests"}'
        eventually(lambda: float(_sample(proxy.url, metric)) > 960_000)
        own, others = ask(proxy.url, "a", 300_000), ask(proxy.url, "c", 500_000)
        assert (own.status_code, own.json()["error"]["code"], own.headers["retry-after"]) == (
            429,
            "too_many_bytes",
            "1",
        )
        assert "half of the proxy's setting max_inflight_request_bytes" in own.json()["error"]["message"]
        assert (others.status_code, others.headers["retry-after"]) == (503, "1")
        assert "max_inflight_request_bytes)" in others.json()["error"]["message"]
        assert ask(proxy.url, "c", 1_000).status_code == 200
        assert {one.result().status_code for one in waiting} == {200}
    eventually(lambda: float(_sample(proxy.url, metric)) == 0)
    assert ask(proxy.url, "a", 300_000).status_code == 200


def _sample(url: str, name: str) -> str:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return next(line.rpartition(" ")[2] for line in lines if line.startswith(name))


def test_a_limit_below_the_largest_body_is_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match=r"max_inflight_request_bytes 150000 .* max_body_bytes 200000"):
        ProxySettings(
            upstreams=("http://127.0.0.1:1",), model="agent", store="s", journal="j",
            max_body_bytes=200_000, max_inflight_request_bytes=150_000,
        )  # fmt: skip
