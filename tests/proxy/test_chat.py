"""Chat Completions: what an agent receives, and what is recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ratchet.store.records import Call, unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from ratchet.store.store import open_store
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import END, ScriptedVllm, logprob, render
from tests.harness.proxy.servers import eventually, leave, served

TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def shared_proxy(scripted: tuple[ScriptedVllm, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """One proxy for all tests of this module."""
    folder = tmp_path_factory.mktemp("proxy")
    store = open_store(str(folder / "store.db"))
    with running(scripted[1], store, folder, max_body_bytes=2**20) as proxy:
        yield proxy
    store.close()


@pytest.fixture
def proxy(shared_proxy: Proxy, vllm: ScriptedVllm) -> Proxy:
    """The module's proxy, with a vLLM that has served no call."""
    assert vllm.calls == []
    return shared_proxy


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def tokens(call: Call, choice: int = 0) -> tuple[int, ...]:
    return unpack_ids(call.choices[choice].token_ids)


def test_a_plain_call_is_answered_and_recorded_with_the_engines_tokens(proxy: Proxy) -> None:
    answer = proxy.agent().chat.completions.create(model="agent", messages=ask("#say=hello.there"), temperature=0.7)
    assert answer.choices[0].message.content == "hello there"
    assert answer.model == "agent@0"
    call = proxy.last_call()
    assert (call.state, call.context, call.linked_by, call.untrainable) == (CallState.ANSWERED, "root", "root", None)
    assert unpack_ids(call.prompt_ids) == tuple(render(ask("#say=hello.there")))
    assert tokens(call) == (*b"hello there", END)
    assert unpack_logprobs(call.choices[0].logprobs) == pytest.approx([logprob(k) for k in range(12)])
    assert call.sampling["temperature"] == 0.7
    assert (call.prompt_tokens, call.completion_tokens) == (len(unpack_ids(call.prompt_ids)), 12)
    found = proxy.store.trajectories.read(call.trajectory_id)
    assert [m["content"] for m in found.messages] == ["#say=hello.there", "hello there"]


def test_a_streamed_call_arrives_as_it_is_generated_and_is_recorded_like_a_plain_one(proxy: Proxy) -> None:
    times, text = [], ""
    with proxy.agent().chat.completions.create(
        model="agent", messages=ask("#say=slow.words #delay=0.03"), stream=True
    ) as stream:
        for chunk in stream:
            times.append(time.monotonic())
            text += chunk.choices[0].delta.content or ""
            assert chunk.model == "agent@0"
    assert text == "slow words"
    assert times[-1] - times[0] > 0.2
    call = proxy.last_call()
    assert (call.streamed, call.state, tokens(call)) == (True, CallState.ANSWERED, (*b"slow words", END))
    assert len(unpack_logprobs(call.choices[0].logprobs)) == 11
    assert call.first_byte_at is not None
    assert call.ended_at is not None
    assert call.first_byte_at < call.ended_at - 0.1


def test_fields_that_the_client_did_not_request_are_null_or_missing_as_at_vllm(proxy: Proxy) -> None:
    body = {"model": "agent", "messages": ask("#say=hi")}
    plain = proxy.http.post("/v1/chat/completions", json=body).json()
    choice = plain["choices"][0]
    assert (plain["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == (None, None, None)
    assert plain["a_field_of_tomorrow"] == {"kept": 1.5}
    streamed = proxy.http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert "token_ids" in streamed
    assert streamed.count('token_ids":') == streamed.count('token_ids":null')
    assert "usage" not in streamed
    assert '"logprob"' not in streamed
    events = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    assert [e["choices"][0]["delta"].get("content") for e in events] == ["", "h", "i", None]


def test_the_client_gets_the_fields_that_it_requested(proxy: Proxy) -> None:
    body = {"model": "agent", "messages": ask("#say=hi"), "logprobs": True, "return_token_ids": True}
    plain = proxy.http.post("/v1/chat/completions", json=body).json()
    assert plain["choices"][0]["token_ids"] == [*b"hi", END]
    assert plain["prompt_token_ids"] == render(body["messages"])
    assert len(plain["choices"][0]["logprobs"]["content"]) == 3
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = proxy.http.post("/v1/chat/completions", json={**body, **options}).text
    assert streamed.count('"logprob"') == 3
    assert '"completion_tokens": 3' in streamed
    assert tokens(proxy.last_call()) == (*b"hi", END)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_are_recorded_with_all_their_tokens(proxy: Proxy, streamed: bool) -> None:
    agent = proxy.agent()
    question = ask("#tool=search")
    if streamed:
        parts = agent.chat.completions.create(model="agent", messages=question, tools=TOOLS, stream=True)
        deltas = [part.choices[0].delta.tool_calls for part in parts if part.choices[0].delta.tool_calls]
        assert "".join(d[0].function.arguments or "" for d in deltas if d[0].function) == '{"q": "budget", "n": 2}'
    else:
        answer = agent.chat.completions.create(model="agent", messages=question, tools=TOOLS)
        assert answer.choices[0].message.tool_calls
    call = proxy.last_call()
    assert (
        bytes(tokens(call)[:-1]).decode()
        == '<tool_call>{"name": "search", "arguments": {"q": "budget", "n": 2}}</tool_call>'
    )
    assert call.choices[0].finish_reason == "tool_calls"
    assert len(call.choices[0].tool_call_ids) == 1
    found = proxy.store.trajectories.read(call.trajectory_id)
    assert found.messages[-1]["tool_calls"][0]["function"]["name"] == "search"
    assert found.tools == tuple(TOOLS)


@pytest.mark.parametrize("streamed", [False, True])
def test_every_choice_of_n_is_recorded(proxy: Proxy, streamed: bool) -> None:
    body = {"model": "agent", "messages": ask("hi"), "n": 3, "stream": streamed}
    assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200
    call = proxy.last_call()
    assert [choice.index for choice in call.choices] == [0, 1, 2]
    assert len({choice.token_ids for choice in call.choices}) == 3
    assert call.untrainable is None


@pytest.mark.parametrize(
    ("text", "extra", "reason"),
    [
        ("#noids", {}, "no_prompt_token_ids"),
        ("#nologprobs", {}, "no_logprobs"),
        ("#short #say=abc", {}, "length_mismatch"),
        ("hi", {"echo": True}, "echo"),
    ],
)
def test_inexact_calls_are_marked_and_never_padded(proxy: Proxy, text: str, extra: Any, reason: str) -> None:
    assert (
        proxy.http.post("/chat/completions", json={"model": "agent", "messages": ask(text), **extra}).status_code == 200
    )
    call = proxy.last_call()
    assert call.untrainable == reason
    if reason != "echo":
        assert (call.choices[0].token_ids, call.choices[0].logprobs) == (b"", b"")


def test_images_are_recorded_and_marked(proxy: Proxy) -> None:
    parts: Any = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    proxy.agent().chat.completions.create(model="agent", messages=[{"role": "user", "content": parts}])
    assert proxy.last_call().untrainable == "image"


def test_unknown_fields_and_sampling_reach_vllm_unchanged(proxy: Proxy, vllm: ScriptedVllm) -> None:
    body = {"model": "agent", "messages": ask("hi"), "min_p": 0.05, "a_field_of_tomorrow": [1, {"x": 1.50}]}
    proxy.http.post("/v1/chat/completions", json=body)
    sent = vllm.calls[-1]
    assert {name: sent[name] for name in body if name != "model"} == {k: v for k, v in body.items() if k != "model"}
    assert (sent["model"], sent["return_token_ids"], sent["logprobs"], sent["top_logprobs"]) == (
        "tiny-base",
        True,
        True,
        0,
    )


def test_sampling_parameters_are_recorded_as_sent(proxy: Proxy) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x" * 5000}}
    tool = {"type": "function", "function": {"name": "f"}}
    sent = {"temperature": "0.7", "top_p": 0.9, "allowed_token_ids": [5], "bad_words": ["no"], "min_tokens": 2}
    sent |= {"guided_regex": "a+", "structured_outputs": {"choice": ["a"]}, "tool_choice": tool, "logit_bias": {"5": 1}}
    body = {"model": "agent", "messages": ask("hi"), **sent, "response_format": schema, "user": "u"}
    assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200
    assert proxy.last_call().sampling == {**sent, "response_format": True}


def test_every_answer_names_its_call_trajectory_and_policy(proxy: Proxy) -> None:
    answer = proxy.http.post(
        "/v1/chat/completions", json={"model": "agent", "messages": ask("hi")}, headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-ratchet-policy"] == "agent@0"
    assert 0 < float(answer.headers["x-ratchet-overhead-ms"]) < 1000
    call = proxy.last_call()
    assert answer.headers["x-ratchet-call"] == call.id
    assert answer.headers["x-ratchet-trajectory"] == call.trajectory_id


def test_an_upstreams_error_keeps_its_status_body_and_retry_after(proxy: Proxy) -> None:
    answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": ask("#status=429")})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"] == {
        "message": "scripted failure",
        "type": "BadRequestError",
        "param": None,
        "code": 429,
    }
    call = proxy.last_call()
    assert (call.state, call.status, call.error) == (CallState.FAILED, 429, "scripted failure")
    page = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": ask("#html")})
    assert (page.status_code, page.json()["error"]["message"]) == (502, "<html>bad gateway</html>")


@pytest.mark.parametrize("how", ["cut", "fault"])
def test_a_failure_in_mid_stream_is_reported_and_recorded(proxy: Proxy, how: str) -> None:
    seen = ""
    stream = proxy.agent().chat.completions.create(model="agent", messages=ask(f"#say=abcdef #{how}=3"), stream=True)
    with pytest.raises(openai.APIError):  # noqa: PT012 -- the words before it count as well
        for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    assert seen == "abc"
    call = proxy.last_call()
    assert (call.state, tokens(call)) == (CallState.FAILED, tuple(b"abc"))
    assert call.untrainable == "failed"


@pytest.mark.slow
def test_an_unreachable_upstream_is_named_to_operators(start: Start, vllm: ScriptedVllm) -> None:
    with served(ScriptedVllm()) as url:
        proxy = start(upstreams=(url,))
    answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": ask("hi")})
    assert answer.status_code == 502
    assert "agent@0" in answer.json()["error"]["message"]
    ready = eventually(lambda: (health := proxy.http.get("/health/ready")).status_code == 503 and health)
    assert url in ready.json()["missing"][0]
    assert proxy.last_call().state == CallState.FAILED


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{broken", 400, "not a JSON object"),
        (b"[]", 400, "not a JSON object"),
        (b'{"model": "agent"}', 400, "messages"),
        (b'{"model": "agent", "messages": []}', 400, "empty"),
        (b'{"model": "agent", "messages": ["x"]}', 400, "messages"),
        (b'{"model": "agent", "messages": [{"role": "assistant", "tool_calls": 5}]}', 400, "wrong type"),
        (b'{"model": "agent", "messages": [' + b"[" * 3000, 400, "max_json_depth"),
        (b'{"model": 5, "messages": []}', 400, "model"),
        (b"\xff\xfe", 400, "not a JSON object"),
        (b'{"messages": []}', 400, "empty"),
        (b'{"model": "gpt-9", "messages": [{"role": "user"}]}', 404, "there are: agent"),
        (b'{"model": "agent@7", "messages": [{"role": "user"}]}', 404, "agent@0"),
        (b'{"model": "agent", "pad": "' + b"x" * 2**20 + b'"}', 413, "larger than 1048576 bytes"),
    ],
)
def test_bad_requests_get_an_error_that_names_the_fault(proxy: Proxy, body: bytes, status: int, says: str) -> None:
    answer = proxy.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_stops_the_upstream_and_is_recorded(
    proxy: Proxy, vllm: ScriptedVllm, streamed: bool
) -> None:
    body = {"model": "agent", "messages": ask("#tokens=1000 #delay=0.02"), "stream": streamed}
    if streamed:
        with proxy.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for _, _ in zip(answer.iter_lines(), range(12), strict=False):
                pass
    else:
        leave(f"{proxy.url}/v1/chat/completions", body, lambda: vllm.calls)
    eventually(lambda: vllm.aborted == 1, 10)  # the whole answer takes 20 seconds
    eventually(lambda: proxy.last_call().state == CallState.ABORTED)
    call = proxy.last_call()
    assert [set(unpack_ids(choice.token_ids)) for choice in call.choices] == ([{120}] if streamed else [])
    assert proxy.agent().chat.completions.create(model="agent", messages=ask("#say=still.here")).choices


def test_a_large_body_is_served(proxy: Proxy) -> None:
    answer = proxy.agent().chat.completions.create(model="agent", messages=ask("y" * 600_000 + " #say=ok"))
    assert answer.choices[0].message.content == "ok"
    assert proxy.last_call().prompt_tokens > 600_000


@pytest.mark.parametrize(
    ("top", "logprobs", "status"), [(2, None, 400), (2, False, 400), (0, None, 200), (2, True, 200)]
)
def test_top_logprobs_without_logprobs_is_refused_as_openai_does(
    proxy: Proxy, top: int, logprobs: bool | None, status: int
) -> None:
    body = {
        "model": "agent",
        "messages": [{"role": "user", "content": "hi"}],
        "top_logprobs": top,
        "logprobs": logprobs,
    }
    answer = proxy.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["param"] == "top_logprobs"


def test_a_developer_message_reaches_the_model_as_system_and_is_recorded_unchanged(
    proxy: Proxy, vllm: ScriptedVllm
) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *ask("#say=hi")]
    for count in (1, 2):
        answer = proxy.agent().chat.completions.create(model="agent", messages=messages)
        assert [m["role"] for m in vllm.calls[-1]["messages"]] == ["system", "user", "assistant", "user"][: 2 * count]
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *ask("#say=bye")]
    call = proxy.last_call()
    found = proxy.store.trajectories.read(call.trajectory_id)
    assert [m["role"] for m in found.messages] == ["developer", "user", "assistant", "user", "assistant"]
    assert call.context == "exact"


def test_the_model_gets_only_the_allowed_tools(proxy: Proxy, vllm: ScriptedVllm) -> None:
    other = {"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "search"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    body = {"model": "agent", "messages": ask("#tool=search"), "tools": [*TOOLS, other], "tool_choice": choice}
    assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200
    assert (vllm.calls[-1]["tools"], vllm.calls[-1]["tool_choice"]) == (TOOLS, "required")
    assert proxy.last_call().sampling["tool_choice"] == choice
    for wrong in ({"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"tools": []}}):
        refused = proxy.http.post("/v1/chat/completions", json={**body, "tool_choice": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_functions_of_the_old_format_are_refused(proxy: Proxy) -> None:
    body = {"model": "agent", "messages": ask("#say=hi"), "functions": [TOOLS[0]["function"]]}
    refused = proxy.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "functions")
    assert "`tools`" in refused.json()["error"]["message"]
    assert proxy.http.post("/v1/chat/completions", json={**body, "functions": None}).status_code == 200


@pytest.mark.parametrize("in_parts", [False, True])
def test_an_answer_that_continued_a_text_is_found_in_the_joined_text(proxy: Proxy, in_parts: bool) -> None:
    texts = ["It is ", "#say=Oslo "]
    parts = [{"type": "text", "text": text} for text in texts]
    messages: Any = [*ask("Where?"), {"role": "assistant", "content": parts if in_parts else "".join(texts)}]
    fields: Any = {"continue_final_message": True, "add_generation_prompt": False}
    create = proxy.agent().chat.completions.create
    answer = create(model="agent", messages=messages, extra_body=fields).choices[0].message.content
    assert answer == "Oslo"
    joined: Any = {"role": "assistant", "content": "".join(texts) + answer}
    create(model="agent", messages=[*ask("Where?"), joined, *ask("and then?")])
    proxy.settled()
    later, first = proxy.store.calls.page(2)
    assert (later.trajectory_id, later.parent_call, later.linked_by) == (first.trajectory_id, first.id, "graph")
