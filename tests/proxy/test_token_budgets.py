"""Token budgets of keys per day and month: counted in the store, refused with the time when they start again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from ratchet.proxy.coordinator.limits.token_budgets import Budgets, TokenBudget
from ratchet.proxy.errors import RateLimited
from ratchet.store.operation_records import KeyTokens
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.proxy.test_agents import BODIES, call, several
from tests.proxy.test_keys import bearer, made

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
DAY = 86400.0


def stored(today: int, this_month: int, day: str = "2026-11-30") -> KeyTokens:
    return KeyTokens(day=day, today=today, this_month=this_month)


def is_open(budget: TokenBudget, now: float) -> bool:
    try:
        budget.check(now)
    except RateLimited:
        return False
    return True


def test_a_budget_is_used_up_by_what_the_store_has_and_by_own_calls() -> None:
    budget = TokenBudget(Budgets(per_day=100), stored(60, 60))
    assert is_open(budget, NOON)
    budget.add(40, NOON)
    assert not is_open(budget, NOON)
    budget.read(stored(100, 100))  # the same calls, now stored
    assert not is_open(budget, NOON)
    other = TokenBudget(Budgets(per_day=100), stored(0, 0))
    other.read(stored(100, 100))  # of other proxies
    assert not is_open(other, NOON)
    other.read(stored(0, 0, day="2026-11-29"))  # read before midnight
    assert not is_open(other, NOON)


def test_a_budget_starts_again_with_the_day_and_with_the_month() -> None:
    budget = TokenBudget(Budgets(per_day=100, per_month=150), stored(0, 0))
    budget.add(100, NOON)
    with pytest.raises(RateLimited, match=r"100 tokens per day .* 2026-12-01 00:00 UTC") as day:
        budget.check(NOON)
    assert dict(day.value.headers) == {b"retry-after": b"43201", b"x-should-retry": b"false"}
    budget = TokenBudget(Budgets(per_day=100, per_month=150), stored(0, 90, day="2026-11-29"))
    budget.add(70, NOON - DAY)
    assert not is_open(budget, NOON), "the month's budget is used up"
    with pytest.raises(RateLimited, match=r"150 tokens per month .* 2026-12-01 00:00 UTC"):
        budget.check(NOON)
    assert is_open(budget, NOON + DAY)
    december = TokenBudget(Budgets(per_month=1), stored(1, 1, day="2026-12-31"))
    with pytest.raises(RateLimited, match="2027-01-01 00:00 UTC"):
        december.check(NOON + 31 * DAY)


@pytest.mark.parametrize("path", BODIES)
def test_a_used_up_budget_is_refused_in_every_dialect_and_named(start: Start, store: Store, path: str) -> None:
    key, row = made(store, tokens_per_day=5)
    other, _ = made(store, tokens_per_day=1_000_000)
    proxy = start(**several())
    assert call(proxy, "mail", path, key).status_code == 200
    refused = call(proxy, "mail", path, key)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert 0 < int(refused.headers["retry-after"]) <= DAY + 1
    error = refused.json()["error"]
    assert "the key's budget of 5 tokens per day" in error["message"]
    assert error["type"] == ("rate_limit_error" if path == "/v1/messages" else "tokens")
    assert (
        proxy.http.post("/v1/embeddings", json={"model": "mail", "input": "x"}, headers=bearer(key)).status_code == 429
    )
    assert proxy.http.get("/v1/models", headers=bearer(key)).status_code == 200
    assert call(proxy, "mail", path, other).status_code == 200
    proxy.settled()
    assert len(store.calls.page()) == 2, "a refused call is not recorded"
    assert store.usage.of_keys([row.id])[row.id].today > 5


def test_a_budget_outlives_a_restart_and_can_be_raised(start: Start, store: Store, tmp_path: Path) -> None:
    key, row = made(store, tokens_per_month=5)
    proxy = start()
    assert ask(proxy, key) == 200
    proxy.settled()
    second = start(journal=tmp_path / "journal-2")
    assert ask(second, key) == 429
    store.keys.update(row.id, tokens_per_month=1_000_000)
    eventually(lambda: ask(second, key) == 200)
    boss, _ = made(store, KeyScope.OPERATOR)
    (listed, _) = proxy.http.get("/api/keys", headers=bearer(boss)).json()["data"]
    assert (listed["tokens_per_month"], listed["tokens_today"] > 5, listed["tokens_this_month"] > 5) == (
        10**6,
        True,
        True,
    )


def ask(proxy: Proxy, key: str) -> int:
    return int(call(proxy, "agent", key=key).status_code)


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_the_sdks_do_not_wait_for_the_next_month(start: Start, store: Store, vllm: ScriptedVllm, sdk: str) -> None:
    key, _ = made(store, tokens_per_month=5)
    proxy = start()
    body: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    assert ask(proxy, key) == 200
    if sdk == "openai":
        with pytest.raises(openai.RateLimitError, match="tokens per month is used up"):
            proxy.agent(key, max_retries=5).chat.completions.create(**body)
    else:
        with (
            anthropic.Anthropic(base_url=proxy.url, auth_token=key, max_retries=5) as client,
            pytest.raises(anthropic.RateLimitError, match="tokens per month is used up"),
        ):
            client.messages.create(**body)
    assert 'ratchet_errors_total{class="rate_limited"} 1.0' in proxy.http.get("/metrics").text, "one request, no retry"
