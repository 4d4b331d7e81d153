"""Fallback to another model, on an outage and for a long prompt: recorded as that model's, never trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ratchet.proxy.settings import ProxySettings
from ratchet.store.records import OTHER
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness.ports import free_port
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.proxy.test_agents import BODIES, VALUES, call
from tests.proxy.test_keys import made
from tests.proxy.test_other_models import entry
from tests.proxy.test_rollouts import plan

LONG: Any = [{"role": "user", "content": "x" * 5000}]


@pytest.fixture
def big() -> Iterator[tuple[ScriptedVllm, str]]:
    app = ScriptedVllm("big-model")
    with served(app) as url:
        yield app, url


def settings(url: str, *, outage: Any = None, context: Any = None, names: tuple[str, ...] = ("big",)) -> dict[str, Any]:
    """Settings with hosted models of these names; `spare` has no server."""
    dead = f"http://127.0.0.1:{free_port()}"
    entries = [entry((dead if name == "spare" else url) + "/v1", "hosted_vllm/big-model", name, None) for name in names]
    return {"model_list": tuple(entries), "fallbacks": {"outage": outage or {}, "context_length": context or {}}}


def records(proxy: Proxy) -> list[tuple[str, str]]:
    proxy.settled()
    return sorted((one.alias, str(one.state)) for one in proxy.store.calls.page())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_another_model_answers_while_the_agents_vllm_is_down(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str], path: str, stream: bool
) -> None:
    proxy = start(**settings(big[1], outage={"agent": ["big"]}))
    vllm.failures_left = 99
    answer = call(proxy, "agent", path, stream=stream)
    assert answer.status_code == 200, answer.text
    assert (answer.headers["x-ratchet-policy"], answer.headers["x-ratchet-fallback-from"]) == ("big", "agent")
    assert len(big[0].calls) == 1
    assert records(proxy) == [("agent", "failed"), ("big", "answered")]
    runs = {run.alias: run.purpose for run in proxy.store.trajectories.page()}
    assert runs == {"agent": "live", "big": OTHER}
    again = call(proxy, "agent", path, stream=stream)
    assert again.headers["x-ratchet-trajectory"] != answer.headers["x-ratchet-trajectory"], "nobody retries it"
    proxy.settled()
    assert "resend" not in {one.linked_by for one in proxy.store.calls.page()}
    vllm.failures_left = 0
    eventually(lambda: proxy.http.get("/health/ready").json()["status"] == "ready")
    back = call(proxy, "agent", path, stream=stream)
    assert (back.headers["x-ratchet-policy"], "x-ratchet-fallback-from" in back.headers) == ("agent@0", False)
    assert 'ratchet_fallbacks_total{alias="agent",model="big",reason="outage"} 2.0' in proxy.http.get("/metrics").text


def test_a_vllm_that_cannot_be_reached_is_an_outage(start: Start, store: Store, big: tuple[ScriptedVllm, str]) -> None:
    store.policies.register_base("agent", "tiny-base")
    dead = f"http://127.0.0.1:{free_port()}"
    proxy = start(upstreams=(dead,), ready=False, **settings(big[1], outage={"agent": ["big"]}))
    assert call(proxy, "agent").headers["x-ratchet-policy"] == "big"


def test_while_all_replicas_are_known_to_be_down_none_is_tried(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    proxy = start(**settings(big[1], outage={"agent": ["big"]}), breaker_failure_threshold=1, breaker_reset_seconds=600)
    vllm.failures_left = 99
    assert call(proxy, "agent").headers["x-ratchet-policy"] == "big"
    tried = len(vllm.calls)
    assert call(proxy, "agent").headers["x-ratchet-policy"] == "big"
    assert len(vllm.calls) == tried


def test_a_proxy_whose_agents_all_have_a_fallback_stays_ready_in_an_outage(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    names = ("spare", "big")
    proxy = start(
        **settings(big[1], outage={"agent": names}, names=names), breaker_failure_threshold=1, breaker_reset_seconds=600
    )
    vllm.failures_left = 99
    assert call(proxy, "agent").headers["x-ratchet-policy"] == "big"
    ready = proxy.http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"], len(ready.json()["missing"])) == (200, "degraded", 1)
    big[0].failures_left = 99
    assert call(proxy, "agent").status_code == 503
    ready = proxy.http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "not ready")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_longer_context_answers_what_does_not_fit(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str], path: str
) -> None:
    vllm.max_model_len = 2000
    proxy = start(**settings(big[1], context={"agent": ["big"]}))
    assert call(proxy, "agent", path).headers["x-ratchet-policy"] == "agent@0"
    assert call(proxy, "agent", path, messages=LONG).headers["x-ratchet-policy"] == "big"
    vllm.failures_left = 1
    assert call(proxy, "agent", path).status_code == 503, "the rule is for long prompts only"


def test_the_next_model_answers_if_the_first_fails_and_the_client_gets_the_last_error(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    names = ("spare", "big")
    proxy = start(**settings(big[1], outage={"agent": names, "big": ["spare"]}, names=names))
    vllm.failures_left = 2
    answer = call(proxy, "agent")
    assert (answer.headers["x-ratchet-policy"], answer.headers["x-ratchet-fallback-from"]) == ("big", "agent")
    assert records(proxy) == [
        ("agent", "failed"), ("big", "answered"), ("spare", "failed"),
    ]  # fmt: skip
    big[0].failures_left = 1
    failed = call(proxy, "agent")
    assert (failed.status_code, "overloaded" in failed.text) == (503, True)
    big[0].failures_left = 1
    assert call(proxy, "big").status_code == 502, "a hosted model falls back too, to a model that is down"


def test_no_other_model_answers_where_the_rule_does_not_say_so(
    start: Start, store: Store, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    own, _ = made(store, models=())
    full, _ = made(store)
    rollout = plan(store)
    proxy = start(**settings(big[1], outage={"agent": ["big"]}), breaker_failure_threshold=100)
    vllm.failures_left = 99
    refused = call(proxy, "agent", key=own)
    assert (refused.status_code, "big" in refused.text) == (503, False), "the key may not call the other model"
    assert call(proxy, "agent@0", key=full).status_code == 503, "a named version is what the client wants"
    assert call(proxy, "agent", f"/t/{rollout}/v1/chat/completions", key=full).status_code == 503
    vllm.failure = 429
    assert call(proxy, "agent", key=full).status_code == 429
    bad = call(proxy, "agent", key=full, messages=[{"role": "user", "content": "#status=400"}])
    assert bad.status_code in (400, 429)
    assert not big[0].calls


def test_without_rules_the_client_gets_the_error(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    proxy = start(**settings(big[1]))
    vllm.failures_left = 99
    assert call(proxy, "agent").status_code == 503
    assert not big[0].calls


def test_a_stream_that_breaks_off_does_not_begin_again(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    proxy = start(**settings(big[1], outage={"agent": ["big"]}))
    cut = [{"role": "user", "content": "#tokens=9 #cut=4"}]
    broken = call(proxy, "agent", stream=True, messages=cut)
    assert "upstream_disconnected" in broken.text
    assert records(proxy) == [("agent", "failed")]
    assert not big[0].calls


def test_previous_responses_of_the_other_model_stay_in_its_trajectory(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    proxy = start(**settings(big[1], outage={"agent": ["big"]}))
    agent, previous, trajectories = proxy.agent(), None, set()
    vllm.failures_left = 99
    for model in ("agent", "big", "big", "agent"):
        answer = agent.responses.with_raw_response.create(model=model, input="#say=one", previous_response_id=previous)
        previous = answer.parse().id
        trajectories.add(answer.headers["x-ratchet-trajectory"])
    assert len(trajectories) == 1


def test_the_conversation_goes_on_with_the_agent_after_an_outage(
    start: Start, vllm: ScriptedVllm, big: tuple[ScriptedVllm, str]
) -> None:
    proxy = start(**settings(big[1], outage={"agent": ["big"]}))
    messages: list[Any] = [{"role": "user", "content": "one"}]
    for number, failing in enumerate((0, 1, 0)):
        vllm.failures_left = failing
        answer = call(proxy, "agent", messages=messages)
        assert answer.status_code == 200
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"more {number}"}]
    proxy.settled()
    runs = {run.alias: run for run in proxy.store.trajectories.page()}
    assert {alias: run.purpose for alias, run in runs.items()} == {"agent": "live", "big": OTHER}
    answered = [one for one in proxy.store.calls.page() if one.state == CallState.ANSWERED]
    assert sorted(one.alias for one in answered) == ["agent", "agent", "big"]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"outage": {"mial": ["big"]}}, "fallbacks.outage .*'mial'.* model_list"),
        ({"outage": {"agent": ["bug"]}}, "agent .*'bug': name .* model_list"),
        ({"context_length": {"big": ["big"]}}, "big cannot fall back to 'big'"),
        ({"timeout": {}}, "Extra inputs"),
    ],
)
def test_a_rule_with_an_unknown_name_is_refused(rules: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ProxySettings(**VALUES, model="agent", model_list=(entry("http://b", name="big"),), fallbacks=rules)
