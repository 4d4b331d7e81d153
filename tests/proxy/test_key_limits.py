"""What one key may do: until when, with which models, and how long an answer may be."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ratchet.proxy.coordinator.keys.key_cache import check_host_has_keys
from ratchet.proxy.errors import StartError
from ratchet.proxy.settings import ProxySettings
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.proxy.test_agents import BODIES, VALUES, call, several
from tests.proxy.test_keys import bearer, made, status
from tests.proxy.test_other_models import KEY, PlainServer, entry


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
    with pytest.raises(StartError, match="there is no API key"):
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
