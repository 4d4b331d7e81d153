"""Silent streams get comments that every client ignores, and later failures are error events."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm

SLOW = "#say=a.slow.answer #wait=0.5"


@pytest.fixture
def proxy(start: Start) -> Proxy:
    return start(keep_alive_seconds=0.1)


def chat(text: str) -> dict[str, Any]:
    return {"model": "agent", "stream": True, "messages": [{"role": "user", "content": text}]}


def test_a_stream_with_a_late_first_token_gets_comments_and_is_complete(proxy: Proxy) -> None:
    with proxy.http.stream("POST", "/v1/chat/completions", json=chat(SLOW)) as answer:
        text = answer.read().decode()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-ratchet-policy"] == "agent@0"
    assert float(answer.headers["x-ratchet-overhead-ms"]) < 90, "the wait is the upstream's"
    before, comment, after = text.partition(": keep-alive\n\n")
    assert before == ""
    assert 2 <= text.count(comment) <= 5
    assert after.endswith("data: [DONE]\n\n")
    proxy.settled()
    (call,) = proxy.store.calls.page(9)
    assert (call.state, call.untrainable) == ("answered", None)


@pytest.mark.slow
def test_a_stream_that_pauses_gets_comments_between_its_events(proxy: Proxy) -> None:
    answer = proxy.http.post("/v1/chat/completions", json=chat("#tokens=3 #delay=0.25")).text
    assert answer.count(": keep-alive\n\n") >= 3
    assert all(event.startswith((": keep-alive", "data: ")) for event in answer.strip().split("\n\n"))


def test_a_quick_stream_gets_no_comments(start: Start) -> None:
    assert "keep-alive" not in start(keep_alive_seconds=3).http.post("/v1/chat/completions", json=chat("hi")).text


def test_an_unstreamed_answer_gets_no_comments(proxy: Proxy) -> None:
    whole = proxy.http.post("/v1/chat/completions", json=chat(SLOW) | {"stream": False})
    assert (whole.status_code, "keep-alive" in whole.text) == (200, False)


def test_with_0_a_silent_stream_stays_silent(start: Start) -> None:
    assert "keep-alive" not in start(keep_alive_seconds=0).http.post("/v1/chat/completions", json=chat(SLOW)).text


@pytest.mark.slow
def test_the_sdks_read_streams_with_comments(proxy: Proxy) -> None:
    agent = proxy.agent()
    request = chat(SLOW)
    chat_text = "".join(chunk.choices[0].delta.content or "" for chunk in agent.chat.completions.create(**request))
    with agent.responses.stream(model="agent", input=SLOW) as events:
        response = events.get_final_response()
    with (
        anthropic.Anthropic(base_url=proxy.url, api_key="k", max_retries=0) as claude,
        claude.messages.stream(model="agent", max_tokens=99, messages=request["messages"]) as stream,
    ):
        message = stream.get_final_message()
    assert (
        chat_text == response.output_text == "".join(getattr(b, "text", "") for b in message.content) == "a slow answer"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code"), [("#status=500", "status_500"), ("#status=429", "rate_limit_exceeded")])
def test_a_refusal_after_a_comment_is_an_error_event_in_every_dialect(proxy: Proxy, script: str, code: str) -> None:
    agent = proxy.agent()
    text = f"{script} #wait=0.3"
    with pytest.raises(openai.APIError, match="scripted failure") as error:
        list(agent.chat.completions.create(**chat(text)))
    assert error.value.code == code
    kinds = [event.type for event in agent.responses.create(model="agent", input=text, stream=True)]
    assert kinds[-1] == "response.failed"
    messages: Any = chat(text)["messages"]
    with (
        anthropic.Anthropic(base_url=proxy.url, api_key="k", max_retries=0) as claude,
        pytest.raises(anthropic.APIStatusError, match="scripted failure"),
    ):
        list(claude.messages.create(model="agent", max_tokens=9, messages=messages, stream=True))
    proxy.settled()
    assert {(call.state, call.status) for call in proxy.store.calls.page(9)} == {("failed", 200)}


def test_an_overflow_after_a_comment_keeps_its_code(proxy: Proxy, vllm: ScriptedVllm) -> None:
    vllm.max_model_len = 10
    agent = proxy.agent(strict=False)  # Responses have no code of their own for a context that is too long
    with pytest.raises(openai.APIError) as error:
        list(agent.chat.completions.create(**chat("#wait=0.3")))
    assert error.value.code == "context_length_exceeded"
    *_, last = agent.responses.create(model="agent", input="#wait=0.3", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert str(last.response.error.code) == "context_length_exceeded"


def test_a_client_that_leaves_while_it_gets_comments_stops_the_upstream(proxy: Proxy) -> None:
    with proxy.http.stream("POST", "/v1/chat/completions", json=chat("#wait=4")) as answer:
        assert next(answer.iter_raw()).startswith(b": keep-alive")
    proxy.http.close()
    proxy.http = type(proxy.http)(base_url=proxy.url, timeout=60)
    proxy.settled()
    (call,) = proxy.store.calls.page(9)
    assert (call.state, call.error) == ("aborted", "the client disconnected")
