"""Which version serves: pinned per trajectory, loaded where it is missing, reported to the trainer."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ratchet.proxy.api_keys import hash_key
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.records import commit_round
from tests.proxy.test_other_models import entry

BODY: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def candidate(proxy: Proxy, version: int) -> None:
    """Register a version with an adapter, as the trainer does."""
    commit_round(proxy.store, "agent", version, checkpoint=f"/adapters/{version}")


def promote(proxy: Proxy, version: int) -> None:
    """Register a version and make it live, as the trainer does; wait until the proxy serves it."""
    candidate(proxy, version)
    proxy.store.policies.promote("agent", version, {})
    eventually(
        lambda: any(
            d.live_versions.get("agent") == version
            for d in proxy.store.proxy_instances.running("agent", time.time() - 2)
        )
    )


@pytest.mark.slow
def test_a_trajectory_ends_on_the_version_it_started_with(proxy: Proxy, vllm: ScriptedVllm) -> None:
    agent = proxy.agent()
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = agent.chat.completions.create(model="agent", messages=messages)
    promote(proxy, 1)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    second = agent.chat.completions.create(model="agent", messages=messages)
    other = agent.chat.completions.create(model="agent", messages=messages[:1])
    assert (first.model, second.model, other.model) == ("agent@0", "agent@0", "agent@1")
    assert [call["model"] for call in vllm.calls if call["model"] in (vllm.base, "agent@1")][-1] == "agent@1"
    assert vllm.calls[1]["model"] == vllm.base


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_new_version_can_be_requested_at_once(proxy: Proxy, path: str) -> None:
    request = BODY if path.endswith("chat/completions") else {"input": "hi"}
    proxy.http.post(path, json=request | {"model": "agent"})  # warms up
    for version in range(1, 6):
        candidate(proxy, version)
        assert proxy.http.post(path, json=request | {"model": f"agent@{version}"}).status_code == 200


def test_an_unknown_adapter_is_loaded_once_before_the_first_byte(proxy: Proxy, vllm: ScriptedVllm) -> None:
    promote(proxy, 1)
    with ThreadPoolExecutor(8) as pool:
        body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
        answers = list(pool.map(lambda n: proxy.http.post("/v1/chat/completions", json=body), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert {answer.headers["x-ratchet-policy"] for answer in answers} == {"agent@1"}
    assert vllm.loads == ["agent@1"]
    vllm.restart()  # it lost its adapters
    assert proxy.http.post("/v1/chat/completions", json=body | {"stream": True}).status_code == 200
    assert vllm.loads == ["agent@1"]


def test_a_version_can_be_requested_by_name(proxy: Proxy, vllm: ScriptedVllm) -> None:
    promote(proxy, 1)
    answer = proxy.agent().chat.completions.create(model="agent@0", messages=[{"role": "user", "content": "hi"}])
    assert answer.model == "agent@0"
    assert vllm.calls[-1]["model"] == vllm.base


@pytest.mark.slow
def test_a_version_in_its_ramp_gets_its_share_of_new_trajectories_and_keeps_them(proxy: Proxy) -> None:
    def began(names: list[str]) -> dict[str, str]:
        answers = [proxy.http.post(f"/t/{name}/v1/chat/completions", json=BODY) for name in names]
        return {name: answer.headers["x-ratchet-policy"] for name, answer in zip(names, answers, strict=True)}

    def share() -> str:
        return next(
            line for line in proxy.http.get("/metrics").text.splitlines() if 'role="ramp"} ' in line and "share" in line
        )

    candidate(proxy, 1)
    first = [f"a{n}" for n in range(200)]
    proxy.store.policies.start_ramp("agent", 1, 0.25)
    eventually(lambda: share().endswith(" 0.25"))
    few = {name for name, policy in began(first).items() if policy == "agent@1"}
    assert 20 <= len(few) <= 85, "50 of 200, within five standard deviations"
    assert f'ratchet_version_trajectories_total{{alias="agent",role="ramp"}} {len(few)}.0' in (
        proxy.http.get("/metrics").text
    )
    proxy.store.policies.set_share("agent", 1, 0.75, by="anna", reason="more")
    eventually(lambda: share().endswith(" 0.75"))
    assert {name for name, policy in began(first).items() if policy == "agent@1"} == few, "pinned"
    more = began([f"b{n}" for n in range(100)])
    assert 50 <= list(more.values()).count("agent@1") <= 98
    assert proxy.http.post("/v1/chat/completions", json=BODY | {"model": "agent@0"}).headers[
        "x-ratchet-policy"] == "agent@0"  # fmt: skip
    proxy.store.policies.reject("agent", 1, {})
    eventually(lambda: share().endswith(" 0.0"))
    assert set(began([f"c{n}" for n in range(30)]).values()) == {"agent@0"}
    assert began(sorted(few))[min(few)] == "agent@1", "a trajectory finishes on the version that it began with"


@pytest.mark.slow
def test_a_rollback_at_once_moves_open_trajectories_and_marks_the_rest_of_them(proxy: Proxy) -> None:
    def ask(**more: Any) -> Any:
        return proxy.http.post("/v1/chat/completions", json={"model": "agent", **more})

    promote(proxy, 1)
    linked: list[Any] = [{"role": "user", "content": "#say=one"}]
    linked.append(ask(messages=linked).json()["choices"][0]["message"])
    proxy.http.post("/t/named/v1/chat/completions", json=BODY)
    finishing = proxy.http.post("/t/finishing/v1/chat/completions", json=BODY)
    assert finishing.headers["x-ratchet-policy"] == "agent@1"
    proxy.store.policies.roll_back_manually("agent", 0, by="anna", reason="rude")
    eventually(lambda: ask(messages=BODY["messages"]).headers["x-ratchet-policy"] == "agent@0")
    ends = proxy.http.post("/t/finishing/v1/chat/completions", json=BODY)
    assert ends.headers["x-ratchet-policy"] == "agent@1", "without --now"
    assert proxy.store.policies.roll_back_manually("agent", 0, by="anna", reason="it deletes mails", now=True) == []
    eventually(
        lambda: proxy.http.post("/t/named/v1/chat/completions", json=BODY).headers["x-ratchet-policy"] == "agent@0"
    )
    linked.append({"role": "user", "content": "#say=two"})
    answers = [ask(messages=linked)]
    linked += [answers[0].json()["choices"][0]["message"], {"role": "user", "content": "#say=three"}]
    answers.append(ask(messages=linked))
    assert {answer.headers["x-ratchet-policy"] for answer in answers} == {"agent@0"}
    proxy.settled()
    first, rest = (proxy.store.trajectories.get(name) for name in ("named", "named~1"))
    assert [(run.version, run.purpose) for run in (first, rest)] == [(1, "live"), (0, "moved")]
    assert rest.draw is None
    (moved,) = [run for run in proxy.store.trajectories.page(99) if run.purpose == "moved" and run.calls == 2]
    assert moved.id == answers[0].headers["x-ratchet-trajectory"] + "~1"


def test_a_resend_goes_to_the_live_version_if_a_rejected_one_answered_nothing(proxy: Proxy, vllm: ScriptedVllm) -> None:
    def ask(task: str, *messages: Any) -> Any:
        body = {"model": "agent", "messages": [{"role": "user", "content": f"#say={task}"}, *messages]}
        return proxy.http.post("/v1/chat/completions", json=body)

    promote(proxy, 1)
    answered = ask("one")
    more = (answered.json()["choices"][0]["message"], {"role": "user", "content": "more"})
    vllm.failures_left = 10**6
    failed = [ask("two"), ask("two")]
    assert [answer.status_code for answer in failed] == [503, 503]
    vllm.failures_left = 0
    proxy.store.policies.roll_back_manually("agent", 0, by="anna", reason="it cannot be loaded")
    eventually(lambda: ask("other").headers.get("x-ratchet-policy") == "agent@0")
    assert ask("two").headers["x-ratchet-policy"] == "agent@0"
    assert ask("one", *more).headers["x-ratchet-policy"] == "agent@1", "it ends on the version that answered it"
    proxy.settled()
    first = proxy.store.trajectories.get(failed[0].headers["x-ratchet-trajectory"])
    assert (first.version, first.calls) == (1, 2), "before the rollback a call is repeated in its trajectory"


def test_an_evaluation_and_a_live_run_never_share_a_trajectory(proxy: Proxy) -> None:
    messages: list[Any] = [{"role": "user", "content": "#say=yes"}]
    for model in ("agent@0", "agent"):
        proxy.http.post("/v1/chat/completions", json={"model": model, "messages": messages})
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}]
    for model in ("agent", "agent@0"):
        proxy.http.post("/v1/chat/completions", json={"model": model, "messages": messages})
    proxy.settled()
    runs = proxy.store.trajectories.page(9)
    assert {(run.purpose, run.calls) for run in runs} == {("eval", 2), ("live", 2)}


@pytest.mark.slow
def test_flips_under_load_fail_no_call_and_mix_no_trajectory(proxy: Proxy) -> None:
    def rollout(number: int) -> set[str]:
        messages: list[Any] = [{"role": "user", "content": f"task {number % 3}"}]
        models = set()
        for _ in range(6):
            answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": messages})
            assert answer.status_code == 200, answer.text
            models.add(answer.headers["x-ratchet-policy"])
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        return models

    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(rollout, number) for number in range(60)]
        for version in (1, 2, 3):
            promote(proxy, version)
        seen = [run.result() for run in runs]
    assert {len(models) for models in seen} == {1}
    proxy.settled()
    calls = proxy.store.calls.page(1000)
    assert len(calls) == 360
    assert len({call.trajectory_id for call in calls}) == 60
    assert {call.context for call in calls} == {"root", "exact"}


def test_models_lists_the_alias_and_every_version(proxy: Proxy) -> None:
    promote(proxy, 1)
    for path in ("/v1/models", "/models", "/t/x/v1/models"):
        assert [card["id"] for card in proxy.http.get(path).json()["data"]] == ["agent", "agent@0", "agent@1"]
    assert proxy.agent().models.retrieve("agent@1").id == "agent@1"
    gone = proxy.http.get("/v1/models/other")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_a_models_card_has_vllms_fields_with_the_shortest_context(start: Start, vllm: ScriptedVllm) -> None:
    other = ScriptedVllm()
    other.max_model_len, vllm.model.root = 4096, "/models/base"
    with served(vllm) as url, served(other) as second:
        proxy = start(upstreams=(url, second), model_list=(entry(second, key=None),), probe_interval_seconds=0.05)
        promote(proxy, 1)
        eventually(lambda: proxy.http.get("/v1/models/agent").json()["max_model_len"] == 4096)
        agent, version, judge = (proxy.http.get(f"/v1/models/{name}").json() for name in ("agent", "agent@1", "judge"))
    assert (agent["root"], agent["parent"]) == ("/models/base", None)
    assert (version["root"], version["parent"], version["max_model_len"]) == ("/models/base", "agent", 4096)
    assert (judge["root"], judge["parent"], judge["max_model_len"]) == (None, None, None)
    assert [card["permission"][0]["allow_sampling"] for card in (agent, version, judge)] == [True] * 3


@pytest.mark.slow
def test_the_trainer_sees_when_a_version_has_drained(start: Start) -> None:
    proxy = start(version_pin_seconds=2)
    proxy.agent().chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
    instance = eventually(
        lambda: [
            d
            for d in proxy.store.proxy_instances.running("agent", time.time() - 2)
            if d.pinned_trajectories == {"agent@0": 1}
        ]
    )[0]
    assert (instance.live_versions, instance.url) == ({"agent": 0}, "http://test")
    drained = eventually(
        lambda: [
            d for d in proxy.store.proxy_instances.running("agent", time.time() - 2) if d.pinned_trajectories == {}
        ]
    )[0]
    assert drained.shipped_until == drained.heartbeat_at


def test_without_vllm_calls_get_503_until_it_starts(start: Start) -> None:
    proxy = start(ready=False, upstreams=("http://127.0.0.1:9",))
    answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [{"role": "user"}]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    missing = " ".join(proxy.http.get("/health/ready").json()["missing"])
    assert "no live version of agent" in missing
    assert "http://127.0.0.1:9" in missing
    assert [proxy.http.get(path).status_code for path in ("/health", "/ping")] == [503, 503]
    assert proxy.http.get("/health/live").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/Load_LoRA_adapter",
        "/v1/x/../load_lora_adapter",
        "/v1/models/../unload_lora_adapter",
        "/t/a/v1/../load_lora_adapter",
        "/v1/%6coad_lora_adapter",
        "/v1/%256coad_lora_adapter",
        "/v1//load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/./load_lora_adapter",
        "/v1/x%2f..%2fload_lora_adapter",
        "/v1/x\\..\\load_lora_adapter",
        "/v1/..;/load_lora_adapter",
        "/v1/load_lora_adapter%3Fx",
        "/v1/load_lora_adapter%23x",
        "/v1/../pause",
        "/v1/%2e%2e/collective_rpc",
        "/v1/%252e%252e/sleep",
        "/v1/update_weights",
        "/v1/chat/completions/batch",
        "/v1/responses/resp_1",
        "/v1/",
    ],
)
def test_agents_reach_no_control_route_of_vllm(proxy: Proxy, path: str, vllm: ScriptedVllm) -> None:
    paths = list(vllm.paths)
    answer = raw(proxy.url, "POST", path, b'{"lora_name": "agent@9", "lora_path": "/tmp"}')
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"unknown_route" in answer
    assert vllm.loads == []
    assert set(vllm.paths[len(paths) :]) <= {"/v1/models"}  # a probe's


def raw(url: str, method: str, path: str, body: bytes) -> bytes:
    """Send a request with an unnormalized path; return the answer."""
    host, port = url.removeprefix("http://").split(":")
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("model", ["agent", "agent@1"])
def test_a_route_that_passes_through_loads_a_missing_adapter_once(proxy: Proxy, vllm: ScriptedVllm, model: str) -> None:
    promote(proxy, 1)
    vllm.restart()
    for _ in range(2):
        answer = proxy.http.post("/v1/embeddings", json={"model": model, "input": "a"})
        assert answer.json()["body"] == '{"model":"agent@1","input":"a"}'
    assert vllm.loads == ["agent@1"]


def test_a_version_with_thousands_of_digits_is_unknown(proxy: Proxy) -> None:
    body = {"model": "agent@" + "9" * 5000, "messages": [{"role": "user", "content": "hi"}]}
    answer = proxy.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert len(answer.text) < 1000


def test_a_query_passes_through_unchanged(proxy: Proxy, vllm: ScriptedVllm) -> None:
    assert b" 200 " in raw(proxy.url, "POST", "/v1/embeddings?a=%2e%2e/%2F&b=c+d", b'{"input": "a"}')
    assert vllm.queries[-1] == b"a=%2e%2e/%2F&b=c+d"


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize", "/t/run-7/v1/pooling"])
def test_routes_that_vllm_has_outside_v1_pass_through(proxy: Proxy, path: str) -> None:
    answer = proxy.http.post(path, json={"model": "agent", "tokens": [1]})
    assert answer.json()["path"] == path[path.rindex("/") :]


def test_what_vllms_clients_ask_a_server_first_is_answered(start: Start) -> None:
    proxy = start(key_hashes=frozenset({hash_key(b"good")}))
    for method, path in (("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert proxy.http.request(method, path).status_code == 200
    for path in ("/version", "/tokenizer_info"):  # vLLM's own answers; not for strangers
        assert proxy.http.get(path).status_code == 401
        assert proxy.http.get(path, headers={"authorization": "Bearer good"}).json()["path"] == path


def test_other_routes_pass_through_with_the_alias_resolved(proxy: Proxy) -> None:
    answer = proxy.http.post("/v1/embeddings?x=1", json={"model": "agent", "input": "a", "n": 1.50})
    assert answer.json() == {"path": "/v1/embeddings", "body": '{"model":"tiny-base","input":"a","n":1.5}'}
    proxy.settled()
    assert proxy.store.calls.page(9) == []
    nowhere = proxy.http.get("/nowhere").json()["error"]
    assert nowhere["code"] == "unknown_route"
    assert "agents use /v1" in nowhere["message"]
