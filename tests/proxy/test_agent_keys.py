"""Agents and keys: which agents and models a key reaches, until when, and how much; the limits of an agent."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from ratchet.proxy.coordinator.keys.key_cache import check_host_has_keys
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.settings import ProxySettings
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.proxy.test_agents import BODIES, VALUES, call, several
from tests.proxy.test_keys import bearer, made, status
from tests.proxy.test_other_models import KEY, PlainServer, entry


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_limited_key_calls_its_agents_only(start: Start, store: Store, path: str, stream: bool) -> None:
    key, row = made(store, agents=("mail", "code"))
    proxy = start(**several())
    for agent, code in (("mail", 200), ("code@0", 200), ("support", 404), ("support@0", 404), ("Support", 404)):
        answer = call(proxy, agent, path, key, stream=stream)
        assert answer.status_code == code, answer.text
        if code == 404:
            error = answer.json()["error"]
            assert "or this key has no access to it" in error["message"]
            assert "support" not in error["message"].replace(repr(agent), "")
            expected = "not_found_error" if path == "/v1/messages" else "invalid_request_error"
            assert error["type"] == expected
    assert call(proxy, "support", path, f"{key}:job", stream=stream).status_code == 404, "the suffix changes nothing"
    proxy.settled()
    assert {run.alias for run in store.trajectories.page()} == {"mail", "code"}
    assert {run.key_id for run in store.trajectories.page()} == {row.id}


def test_a_limited_key_sees_its_agents_only(start: Start, store: Store) -> None:
    key, _ = made(store, agents=("mail",))
    full, _ = made(store)
    with served(PlainServer()) as url:
        proxy = start(**several(model_list=(entry(url),), model_keys={"K": KEY}))
        listed = proxy.http.get("/v1/models", headers=bearer(key)).json()["data"]
        assert [card["id"] for card in listed] == ["mail", "mail@0", "judge"]
        assert len(proxy.http.get("/v1/models", headers=bearer(full)).json()["data"]) == 7
        for name, status in (("mail", 200), ("support", 404), ("support@0", 404), ("judge", 200)):
            assert proxy.http.get(f"/v1/models/{name}", headers=bearer(key)).status_code == status
        claude = {**bearer(key), "anthropic-version": "2023-06-01"}
        refused = proxy.http.get("/v1/models/support", headers=claude)
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        assert call(proxy, "judge", key=key).status_code == 200, "other models are open to every key"


def test_a_limited_key_reaches_no_other_agent_by_a_side_way(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    limited, _ = made(store, agents=("mail",))
    full, _ = made(store)
    proxy = start(**several())
    count = {**BODIES["/v1/messages"], "model": "support"}
    assert proxy.http.post("/v1/messages/count_tokens", json=count, headers=bearer(limited)).status_code == 404
    embed = {"model": "support", "input": "hi"}
    assert proxy.http.post("/v1/embeddings", json=embed, headers=bearer(limited)).status_code == 404
    assert (
        proxy.http.post("/v1/embeddings", json={**embed, "model": "mail"}, headers=bearer(limited)).status_code == 200
    )
    raw = b'{"model": "support", "input": "hi"}'
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
        refused = proxy.http.post("/v1/embeddings", content=raw, headers={**bearer(limited), "content-type": kind})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        passed = proxy.http.post("/v1/score", content=raw, headers={**bearer(full), "content-type": kind})
        assert passed.status_code == 200
    nameless = proxy.http.post("/v1/embeddings", json={"input": "hi"}, headers=bearer(limited))
    assert nameless.status_code == 403
    assert all(body["model"] == vllm.base for body in vllm.calls)


def test_a_limited_key_neither_reads_nor_judges_nor_joins_what_another_agent_did(start: Start, store: Store) -> None:
    limited, _ = made(store, agents=("mail",))
    full, _ = made(store)
    proxy = start(**several())
    secret = proxy.http.post(
        "/t/job/v1/responses", json={"model": "support", "input": "my secret"}, headers=bearer(full)
    )
    name, mine = secret.json()["id"], bearer(limited)
    assert proxy.http.get(f"/v1/responses/{name}", headers=mine).status_code == 404
    assert proxy.http.get(f"/v1/responses/{name}/input_items", headers=mine).status_code == 404
    follow = {"model": "mail", "input": "what was it?", "previous_response_id": name}
    assert proxy.http.post("/v1/responses", json=follow, headers=mine).status_code == 404
    for target in ({"response_id": name}, {"trajectory_id": "job"}, {"call_id": secret.headers["x-ratchet-call"]}):
        assert proxy.http.post("/api/feedback", json={**target, "value": 0}, headers=mine).status_code == 404
    joined = proxy.http.post("/t/job/v1/responses", json={"model": "mail", "input": "hi"}, headers=mine)
    assert joined.headers["x-ratchet-trajectory"] != "job"
    assert proxy.http.get("/api/trajectories/job", headers=mine).status_code == 403


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


def test_a_key_is_rejected_from_its_expiry_on(start: Start, store: Store) -> None:
    lasting, _ = made(store, expires_at=time.time() + 3600)
    expired, _ = made(store, expires_at=time.time() - 60)
    boss, _ = made(store, KeyScope.OPERATOR, expires_at=time.time() - 60)
    proxy = start()
    assert (status(proxy, lasting), status(proxy, expired), status(proxy, f"{expired}:job")) == (200, 401, 401)
    refused = proxy.http.get("/v1/models", headers=bearer(expired)).json()["error"]
    assert (refused["code"], "the API key expired at 20" in refused["message"]) == ("expired_api_key", True)
    assert proxy.http.get("/api/calls", headers=bearer(boss)).json()["error"]["code"] == "expired_api_key"
    assert proxy.http.get("/api/calls").status_code == 401, "an expired operator's key still turns keys on"
    soon, _ = made(store, expires_at=time.time() + 2)
    eventually(lambda: status(proxy, soon) == 401)


def test_a_proxy_for_other_machines_needs_a_key_that_is_valid(store: Store) -> None:
    settings = ProxySettings(**VALUES, model="agent", host="0.0.0.0")
    made(store, expires_at=time.time() - 60)
    with pytest.raises(ProxyError, match="there is no API key"):
        check_host_has_keys(settings, store.keys.all())
    made(store, expires_at=time.time() + 60)
    check_host_has_keys(settings, store.keys.all())


@pytest.mark.parametrize("path", BODIES)
def test_a_key_calls_the_models_that_it_names_only(start: Start, store: Store, path: str) -> None:
    judges, _ = made(store, agents=(), models=("judge",))
    agents, _ = made(store, models=())
    with served(PlainServer()) as url:
        proxy = start(**several(model_list=(entry(url), entry(url, name="teacher")), model_keys={"K": KEY}))
        for key, model, expected in (
            (judges, "judge", 200), (judges, "teacher", 404), (judges, "mail", 404), (judges, "mail@0", 404),
            (agents, "judge", 404), (agents, "mail", 200),
        ):  # fmt: skip
            answer = call(proxy, model, path, key)
            assert answer.status_code == expected, answer.text
            assert "teacher" not in answer.text.replace(f"model '{model}'", "")


def test_a_key_sees_and_embeds_with_its_models_only(start: Start, store: Store) -> None:
    key, _ = made(store, agents=(), models=("judge",))
    with served(PlainServer()) as url:
        proxy = start(**several(model_list=(entry(url), entry(url, name="teacher")), model_keys={"K": KEY}))
        listed = proxy.http.get("/v1/models", headers=bearer(key)).json()["data"]
        assert [card["id"] for card in listed] == ["judge"]
        for model, expected in (("judge", 200), ("teacher", 404), ("mail", 404)):
            body = {"model": model, "input": "hi"}
            answer = proxy.http.post("/v1/embeddings", json=body, headers=bearer(key))
            assert answer.status_code == expected, answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "given", "name", "sent"),
    [
        ("/v1/chat/completions", {"max_tokens": 9000}, "max_tokens", 30),
        ("/v1/chat/completions", {"max_completion_tokens": "9000"}, "max_completion_tokens", 30),
        ("/v1/chat/completions", {"max_tokens": 9000.0}, "max_tokens", 30),
        ("/v1/chat/completions", {"max_tokens": 7}, "max_tokens", 7),
        ("/v1/chat/completions", {}, "max_completion_tokens", 30),
        ("/v1/chat/completions", {"max_tokens": None}, "max_completion_tokens", 30),
        ("/v1/completions", {"max_tokens": 9000}, "max_tokens", 30),
        ("/v1/completions", {"max_tokens": None}, "max_tokens", 30),
        ("/v1/completions", {}, "max_tokens", None),
        ("/v1/responses", {"max_output_tokens": 9000}, "max_tokens", 30),
        ("/v1/responses", {}, "max_completion_tokens", 30),
        ("/v1/messages", {"max_tokens": 9000}, "max_tokens", 30),
    ],
)
def test_a_longer_answer_is_cut_at_the_keys_max_tokens(
    start: Start, store: Store, vllm: ScriptedVllm, path: str, given: Any, name: str, sent: int | None, stream: bool
) -> None:
    key, _ = made(store, max_tokens=30)
    proxy = start(**several(redact=("email",)))
    answer = call(proxy, "mail", path, key, stream=stream, **given)
    assert answer.status_code == 200, answer.text
    assert vllm.calls[-1].get(name) == sent
    proxy.settled()
    assert store.calls.page()[0].sampling.get(name) == sent, "the record shows what was sampled with"


def test_the_cap_is_within_the_models_context(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    vllm.max_model_len = 2048
    key, _ = made(store, max_tokens=100_000)
    proxy = start(**several())
    eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
    assert call(proxy, "mail", key=key).status_code == 200
    assert vllm.calls[-1]["max_completion_tokens"] == 2048
    call(proxy, "mail", key=key, max_tokens="many")
    assert vllm.calls[-1]["max_tokens"] == "many", "vLLM refuses it, in its own words"
