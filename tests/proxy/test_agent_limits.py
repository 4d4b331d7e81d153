"""Limits of agents: over all keys, beside the keys' own limits, without harm to other agents."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ratchet.proxy.settings import ProxySettings
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Start
from tests.proxy.test_agents import BODIES, VALUES, call, several
from tests.proxy.test_keys import made


def limits(**mail: int) -> dict[str, Any]:
    return {"agent_limits": {"mail": mail}}


@pytest.mark.parametrize("path", BODIES)
def test_an_agents_requests_are_limited_over_all_keys(start: Start, store: Store, path: str) -> None:
    keys = [made(store)[0] for _ in range(3)]
    proxy = start(**several(**limits(requests_per_minute=2)))
    assert [call(proxy, "mail", path, key).status_code for key in keys] == [200, 200, 429]
    refused = call(proxy, "mail@0", path, keys[0])
    assert re.search(r"agent mail.* 2 requests per minute", refused.json()["error"]["message"])
    assert int(refused.headers["retry-after"]) <= 31
    assert [call(proxy, "support", path, key).status_code for key in keys] == [200] * 3
    proxy.settled()
    assert len([one for one in store.calls.page() if one.alias == "mail"]) == 2, "a refused call is not recorded"


def test_a_key_that_may_not_call_an_agent_uses_up_nothing_of_its_limit(start: Start, store: Store) -> None:
    stranger, _ = made(store, agents=("support",))
    key, _ = made(store)
    proxy = start(**several(**limits(requests_per_minute=1)))
    assert [call(proxy, "mail", key=stranger).status_code for _ in range(3)] == [404] * 3
    assert call(proxy, "mail", key=key).status_code == 200


def test_the_tokens_of_both_the_key_and_the_agent_are_settled(start: Start, store: Store) -> None:
    key, _ = made(store, tokens_per_minute=100_000)
    proxy = start(**several(**limits(tokens_per_minute=1000)))
    for _ in range(5):  # each reserves 600 tokens and uses a few
        answer = call(proxy, "mail", key=key, max_tokens=600)
        assert answer.status_code == 200, answer.text
    assert call(proxy, "nobody", key=key, max_tokens=600).status_code == 404
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 90_000
    long = [{"role": "user", "content": "x" * 40_000}]
    refused = call(proxy, "mail", key=key, messages=long)
    assert refused.status_code == 429
    assert re.search(r"agent mail.* 1000 tokens per minute", refused.text)
    assert call(proxy, "support", key=key, messages=long).status_code == 200


def test_a_limit_of_an_unknown_agent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"agent_limits.*'mial'.*: there are mail, support"):
        ProxySettings(**VALUES, agents=("mail", "support"), agent_limits={"mial": {"requests_per_minute": 1}})
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ProxySettings(**VALUES, model="mail", agent_limits={"mail": {"requests_per_minute": 0}})
