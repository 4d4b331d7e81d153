"""A prompt that is too long gets the error of its dialect; a prompt that fits is never refused."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from ratchet.proxy.wire.context_limit import parse_context_overflow
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm, render

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
