"""JSON values are coerced as pydantic, and so vLLM, coerces them, in every dialect."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from pydantic import TypeAdapter, ValidationError

from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.context_limit import parse_context_overflow
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm, render

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 0.0, -0.0, 1.5, 2.0, -3.0, 1e18, 1e300, 2**63, 2**70, float("inf"),
    float("nan"), "1", "0", "2", " 1 ", "\n5\t", "+1", "-3", "--1", "1_000", "_1", "1_", "1__0", "01", "0x1", "1e3",
    "1.0", "-1.00", "1.", ".0", "1.5", " 1.0 ", "1_0.0", "\uff11", "\u0663", "9" * 30, "9" * 4300, "9" * 4301, "true",
    "tRuE", "FALSE", "t", "F", "yes", "Yes", "y", "no", "N", "on", "ON", "off", " on", "on ", "", "enabled", "o\ufb00",
    "\u017f", [], {}, [1],
]  # fmt: skip


def by_pydantic(kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:24])
def test_a_value_is_read_as_pydantic_reads_it(value: Any) -> None:
    assert (lax_values.lax_bool(value), lax_values.lax_int(value)) == (
        by_pydantic(bool, value),
        by_pydantic(int, value),
    )


HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 20},
}
TRUE = [1, 1.0, "1", "true", "True", "yes", "on"]


def post(proxy: Proxy, path: str, **fields: Any) -> Any:
    return proxy.http.post(path, json={"model": "agent", **BODIES[path], **fields})


def last_reason(proxy: Proxy) -> str | None:
    return proxy.last_call().untrainable


@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_beam_search_and_echo_are_never_trained_in_any_spelling_of_true(
    proxy: Proxy, vllm: ScriptedVllm, path: str, true: Any
) -> None:
    for name, reason in (("use_beam_search", "beam_search"), ("echo", "echo")):
        assert post(proxy, path, **{name: true}).status_code == 200
        assert vllm.calls[-1][name] == true
        assert last_reason(proxy) == reason


@pytest.mark.slow
@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("path", BODIES)
def test_any_spelling_of_true_requests_a_stream(proxy: Proxy, path: str, true: Any) -> None:
    answer = post(proxy, path, stream=true)
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert last_reason(proxy) is None


@pytest.mark.slow
@pytest.mark.parametrize("false", [0, "0", "false", "off", None])
@pytest.mark.parametrize("path", BODIES)
def test_any_spelling_of_false_requests_nothing(proxy: Proxy, path: str, false: Any) -> None:
    more: dict[str, Any] = {"echo": false, "use_beam_search": false} if "completions" in path else {}
    answer = post(proxy, path, stream=false, return_token_ids=false, **more)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.text.count('token_ids":') == answer.text.count('token_ids":null')
    assert last_reason(proxy) is None


@pytest.mark.parametrize("true", TRUE)
def test_ids_logprobs_and_usage_reach_the_client_that_requests_them(proxy: Proxy, true: Any) -> None:
    chat = post(proxy, "/v1/chat/completions", logprobs=true, return_token_ids=true).json()
    assert chat["prompt_token_ids"]
    assert chat["choices"][0]["logprobs"]["content"]
    assert post(proxy, "/v1/completions", return_token_ids=true).json()["choices"][0]["token_ids"]
    options = {"include_usage": true}
    assert '"usage":{' in post(proxy, "/v1/chat/completions", stream=True, stream_options=options).text


def test_any_spelling_of_false_turns_storing_off(proxy: Proxy) -> None:
    for store, status in (("false", 404), (0, 404), (1, 200)):
        name = post(proxy, "/v1/responses", store=store).json()["id"]
        assert post(proxy, "/v1/responses", previous_response_id=name).status_code == status


def test_values_that_are_no_boolean_are_left_to_vllm_to_refuse(proxy: Proxy) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert post(proxy, path, use_beam_search="perhaps").status_code == 400


LONG: Any = [{"role": "user", "content": "x" * 400}]
PROMPT_TOKENS = len(render(LONG))


@pytest.fixture
def limited(vllm: ScriptedVllm, start: Start) -> Proxy:
    """A proxy with a vLLM whose context is 300 tokens."""
    vllm.max_model_len = 300
    return start()


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_refusal_has_the_code_that_openai_clients_know(limited: Proxy, stream: bool) -> None:
    agent = limited.agent()
    with pytest.raises(openai.BadRequestError) as chat:
        agent.chat.completions.create(model="agent", messages=LONG, stream=stream)
    with pytest.raises(openai.BadRequestError) as responses:
        agent.responses.create(model="agent", input="x" * 400, stream=stream)
    with pytest.raises(openai.BadRequestError) as completions:
        agent.completions.create(model="agent", prompt="x" * 400, stream=stream)
    for error, tokens in ((chat, PROMPT_TOKENS), (responses, PROMPT_TOKENS), (completions, 400)):
        assert (error.value.code, error.value.type) == ("context_length_exceeded", "invalid_request_error")
        assert f"maximum context length is 300 tokens. However, your prompt contains {tokens}" in error.value.message
    limited.settled()
    assert {(call.state, call.status) for call in limited.store.calls.page(9)} == {("refused", 400)}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_clients_get_the_message_that_makes_them_shorten(limited: Proxy, stream: bool) -> None:
    with (
        anthropic.Anthropic(base_url=limited.url, api_key="k", max_retries=0) as claude,
        pytest.raises(anthropic.BadRequestError) as error,
    ):
        claude.messages.create(model="agent", max_tokens=9, messages=LONG, stream=stream)
    body: Any = error.value.body
    assert body["error"]["message"] == f"prompt is too long: {PROMPT_TOKENS} tokens > 300 maximum"
    assert body["error"]["details"] == {"error_code": "context_length_exceeded"}


def test_token_ids_beyond_the_context_are_refused_before_they_are_sent(limited: Proxy, vllm: ScriptedVllm) -> None:
    agent = limited.agent()
    prompts: Any = {300: [1] * 300, 301: [[1], [2] * 301]}
    for tokens, prompt in prompts.items():
        with pytest.raises(openai.BadRequestError, match=f"your prompt contains {tokens} input tokens") as error:
            agent.completions.create(model="agent", prompt=prompt)
        assert error.value.code == "context_length_exceeded"
    assert vllm.calls == []
    agent.completions.create(model="agent", prompt=[65] * 299)
    cut = {"model": "agent", "prompt": [65] * 400, "truncate_prompt_tokens": 10}
    assert limited.http.post("/v1/completions", json=cut).json()["error"]["code"] == "context_length_exceeded"
    assert len(vllm.calls) == 2, "what vLLM may cut is vLLM's to judge"


@pytest.mark.parametrize(
    ("message", "limit", "tokens"),
    [
        (
            "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input "
            "tokens, which exceeds this limit even without any output tokens.",
            1024,
            1025,
        ),
        (
            "This model's maximum context length is 1024 tokens. However, your prompt contains 99999 characters (more "
            "than 2048 characters, which is the upper bound for 1024 input tokens).",
            1024,
            None,
        ),
        ("Input length (1100) exceeds model's maximum context length (1024).", 1024, 1100),
        ("The decoder prompt (length 1100) is longer than the maximum model length of 1024. Make sure", 1024, 1100),
        ("This model's maximum context length is 8 tokens. However, you requested 12 tokens (4 in the", 8, 12),
    ],
)
def test_every_overflow_message_of_vllm_is_parsed(message: str, limit: int, tokens: int | None) -> None:
    overflow = parse_context_overflow(400, message)
    assert overflow is not None
    assert (overflow.limit, overflow.prompt_tokens, str(overflow)) == (limit, tokens, message)
    assert parse_context_overflow(500, message) is None


def test_another_refusal_is_no_overflow() -> None:
    assert parse_context_overflow(400, "max_tokens must be at least 1, got 0.") is None
