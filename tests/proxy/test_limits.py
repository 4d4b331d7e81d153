"""Rate limits per key: calls over them get an error in the client's dialect, and no other key is affected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ratchet.proxy.api_keys import hash_key
from ratchet.proxy.coordinator.limits.buckets import Bucket
from ratchet.proxy.coordinator.limits.rate_limits import KeyMeter, TokenReservation, estimate
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, leave
from tests.proxy.test_keys import bearer, made

USER: Any = {"role": "user", "content": "hi"}
CHAT: Any = {"model": "agent", "messages": [USER], "max_tokens": 20}
ROUTES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "agent", "prompt": "hi"}),
    ("/v1/responses", {"model": "agent", "input": "hi"}),
    ("/v1/embeddings", {"model": "agent", "input": "hi"}),
    ("/v1/models", None),
]


def post(proxy: Proxy, key: str, body: Any = CHAT, path: str = "/v1/chat/completions") -> Any:
    return proxy.http.request("GET" if body is None else "POST", path, json=body, headers=bearer(key))


def test_a_bucket_gives_a_minutes_worth_and_refills_evenly() -> None:
    bucket = Bucket(60, now=0.0)
    assert [bucket.take(1, 0.0) for _ in range(60)] == [0.0] * 60
    assert bucket.take(1, 0.0) == pytest.approx(1.0)
    assert bucket.take(2, 1.5) == pytest.approx(0.5)
    assert bucket.take(1, 1.5) == 0.0
    assert bucket.full_in(1.5) == pytest.approx(59.5)
    bucket.take(0, 1e6)
    assert bucket.level == 60


def test_unused_reserved_tokens_are_returned() -> None:
    bucket = Bucket(100, now=0.0)
    bucket.take(80, 0.0)
    bucket.give(70, 0.0)
    assert bucket.level == 90
    bucket.give(-150, 0.0)
    assert bucket.level == -60
    assert bucket.take(1, 0.0) == pytest.approx(61 * 0.6)


def test_a_call_over_the_limit_waits_for_a_full_bucket_and_may_leave_a_debt() -> None:
    bucket = Bucket(100, now=0.0)
    assert bucket.take(1000, 0.0) == 0.0
    assert bucket.level == 0
    assert bucket.take(1000, 0.0) == pytest.approx(60)
    bucket.give(100 - 1000, 0.0)
    assert bucket.take(1000, 0.0) == pytest.approx(600)


@pytest.mark.parametrize("max_tokens", [10**9, 2**62, "1000000000"])
@pytest.mark.parametrize("used", [0, 3, 10**7])
def test_no_abandoned_call_costs_its_key_more_than_a_full_bucket(max_tokens: Any, used: int) -> None:
    for context in (None, 4096):
        meter = KeyMeter(None, 100_000)
        hold = TokenReservation(meter)
        hold.reserve({"max_tokens": max_tokens, "n": 100}, b"x" * 400, context)
        assert _seconds(meter) <= 60.01
        hold.use(used, left=True)
        hold.settle()
        assert _seconds(meter) <= 60.01
        assert used != 3 or _seconds(meter) < 0.1


def _seconds(meter: KeyMeter) -> float:
    """Return how many seconds a key waits for a full bucket."""
    reset = dict(meter.headers())[b"x-ratelimit-reset-tokens"].decode()
    minutes, _, rest = reset.rpartition("m") if not reset.endswith("ms") else ("", "", f"{int(reset[:-2]) / 1000}s")
    return 60 * int(minutes or 0) + float(rest.removesuffix("s"))


def test_the_estimate_never_exceeds_the_models_context() -> None:
    assert estimate({"max_tokens": 10**9, "n": 2}, b"x" * 400, 4096) == 100 + 2 * 4096
    assert estimate({"max_tokens": 10**9}, b"x" * 400_000, 4096) == 2 * 4096
    assert estimate({"max_tokens": 50, "n": 2}, b"x" * 400, 4096) == 100 + 2 * 50


def test_a_huge_max_tokens_reserves_no_more_than_the_context(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    key, _ = made(store, tokens_per_minute=20_000)
    vllm.max_model_len = 2048
    proxy = start()
    eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
    slow = {**CHAT, "max_tokens": 10**9, "messages": [{"role": "user", "content": "#tokens=500 #delay=0.1"}]}

    def served_meanwhile() -> bool:
        if "#tokens" not in str(vllm.calls):
            return False
        answer = post(proxy, key)
        assert (answer.status_code, int(answer.headers["x-ratelimit-remaining-tokens"]) > 15_000) == (200, True)
        return True

    leave(f"{proxy.url}/v1/chat/completions", slow, served_meanwhile, key)
    eventually(lambda: vllm.aborted)
    assert post(proxy, key).status_code == 200


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({}, 100 + 512),
        ({"max_tokens": 7, "n": 3}, 100 + 21),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 100 + 9),
        ({"max_tokens": "many", "n": None}, 100 + 512),
        ({"max_tokens": -1, "n": -1}, 100 + 512),
    ],
)
def test_the_estimate_is_the_prompt_and_max_tokens(sampling: Any, tokens: int) -> None:
    assert estimate(sampling, b"x" * 400) == tokens


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_requests_over_the_limit_get_429_and_retry_after(start: Start, store: Store, path: str, body: Any) -> None:
    key, _ = made(store, requests_per_minute=2)
    proxy = start()
    for left in ("1", "0"):
        answer = post(proxy, key, body, path)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    refused = post(proxy, key, body, path)
    assert refused.status_code == 429
    assert 20 <= int(refused.headers["retry-after"]) <= 30
    assert 20_000 <= int(refused.headers["retry-after-ms"]) <= 30_001
    assert re.fullmatch(r"1m0s|5\d(\.\d+)?s", refused.headers["x-ratelimit-reset-requests"])
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")


def test_messages_get_anthropics_error_format(start: Start, store: Store) -> None:
    key, _ = made(store, requests_per_minute=1)
    proxy = start()
    body = {"model": "agent", "messages": [USER], "max_tokens": 5}
    assert post(proxy, key, body, "/v1/messages").status_code == 200
    refused = post(proxy, key, body, "/v1/messages")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")


def test_a_refused_call_is_neither_forwarded_nor_recorded(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    key, _ = made(store, tokens_per_minute=30)
    proxy = start()
    assert post(proxy, key).status_code == 200
    refused = post(proxy, key)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    proxy.settled()
    assert len(vllm.calls) == len(store.calls.page()) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_the_reservation_is_replaced_by_the_used_tokens(start: Start, store: Store, streamed: bool) -> None:
    key, _ = made(store, tokens_per_minute=100_000)
    proxy = start()
    body = {**CHAT, "max_tokens": 50_000, "stream": streamed}
    reserved = int(post(proxy, key, body).headers["x-ratelimit-remaining-tokens"])
    assert reserved < 55_000  # some is refilled already
    proxy.settled()
    used = sum(call.prompt_tokens + call.completion_tokens for call in store.calls.page())
    left = eventually(lambda: _left(proxy, key))
    assert left == pytest.approx(100_000 - used, abs=5000)  # some was refilled meanwhile
    assert left > 90_000


def _left(proxy: Proxy, key: str) -> int:
    left = int(post(proxy, key, None, "/v1/models").headers["x-ratelimit-remaining-tokens"])
    return left if left > 60_000 else 0


def test_a_failed_call_costs_no_tokens_and_an_aborted_one_does(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    key, _ = made(store, tokens_per_minute=1000)
    proxy = start()
    failing = {**CHAT, "max_tokens": 900, "messages": [{"role": "user", "content": "#status=400"}]}
    for _ in range(3):
        assert post(proxy, key, failing).status_code == 400
    slow = {**CHAT, "max_tokens": 900, "messages": [{"role": "user", "content": "#tokens=500 #delay=0.1"}]}
    leave(f"{proxy.url}/v1/chat/completions", slow, lambda: "#tokens" in str(vllm.calls), key)
    eventually(lambda: vllm.aborted)
    proxy.settled()
    assert store.calls.page(limit=1)[0].state == "aborted"
    assert post(proxy, key, {**CHAT, "max_tokens": 900}).status_code == 429


def test_keys_are_limited_separately_and_a_key_without_limits_gets_no_headers(start: Start, store: Store) -> None:
    (one, _), (two, _), (free, _) = made(store, requests_per_minute=1), made(store, requests_per_minute=1), made(store)
    proxy = start()
    assert [post(proxy, key).status_code for key in (one, one, two, two)] == [200, 429, 200, 429]
    answers = [post(proxy, free) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert not any(name.startswith("x-ratelimit") for name in answers[0].headers)


def test_default_limits_apply_to_keys_without_their_own_and_without_keys(start: Start, tmp_path: Path) -> None:
    proxy = start(requests_per_minute=1)
    assert [post(proxy, key).status_code for key in ("a", "b")] == [200, 429]
    keys = frozenset({hash_key(b"env")})
    proxy = start(requests_per_minute=1, key_hashes=keys, journal=tmp_path / "journal-2")
    assert [post(proxy, "env").status_code for _ in range(2)] == [200, 429]
    assert proxy.http.get("/health/live").status_code == 200
