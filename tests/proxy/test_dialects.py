"""All dialects record the same tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.store.records import unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import END, ScriptedVllm, logprob, render, tool_text
from tests.harness.proxy.servers import eventually

ARGUMENTS = {"q": "budget", "n": 2}
WORDS = {
    "#think=let.me.see #say=hello.there": "<think>let me see</think>hello there",
    "#tool=search+read": tool_text("search", ARGUMENTS) + tool_text("read", ARGUMENTS),
}
SCHEMA: Any = {"type": "object", "properties": {}}

Ask = Callable[[Proxy, str, bool, bool], None]


def by_chat(proxy: Proxy, text: str, streamed: bool, tools: bool) -> None:
    request: Any = {"model": "agent", "messages": [{"role": "user", "content": text}], "stream": streamed}
    if tools:
        request["tools"] = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
    answer = proxy.agent().chat.completions.create(**request)
    assert list(answer)


def by_responses(proxy: Proxy, text: str, streamed: bool, tools: bool) -> None:
    request: Any = {"model": "agent", "input": text, "stream": streamed}
    if tools:
        request["tools"] = [{"type": "function", "name": "search", "parameters": SCHEMA, "strict": False}]
    answer = proxy.agent().responses.create(**request)
    assert list(answer)


def by_messages(proxy: Proxy, text: str, streamed: bool, tools: bool) -> None:
    request: Any = {"model": "agent", "messages": [{"role": "user", "content": text}], "max_tokens": 300}
    if tools:
        request["tools"] = [{"name": "search", "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=proxy.url, api_key="k", max_retries=0, timeout=60) as client:
        assert list(client.messages.create(**request, stream=streamed))


def by_completions(proxy: Proxy, text: str, streamed: bool, tools: bool) -> None:
    agent = proxy.agent(strict=False)  # its type demands a finish reason in every chunk
    answer: Any = agent.completions.create(model="agent", prompt=text, stream=streamed)
    assert list(answer)


@pytest.mark.slow
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages, by_completions])
def test_every_dialect_records_the_same_tokens(proxy: Proxy, ask: Ask, text: str, streamed: bool, tools: bool) -> None:
    ask(proxy, text, streamed, tools)
    call = proxy.last_call()
    assert (f"by_{call.dialect}", call.streamed) == (ask.__name__, streamed)
    assert (call.state, call.untrainable, call.linked_by) == (CallState.ANSWERED, None, "root")
    sampled = (*WORDS[text].encode(), END)
    assert unpack_ids(call.choices[0].token_ids) == sampled
    assert unpack_logprobs(call.choices[0].logprobs) == pytest.approx([logprob(k) for k in range(len(sampled))])
    prompt = text.encode() if ask is by_completions else render([{"role": "user", "content": text}])
    assert unpack_ids(call.prompt_ids) == tuple(prompt)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "#tokens=1000 #delay=0.02"}),
        (
            "/t/run-7/v1/messages",
            {"messages": [{"role": "user", "content": "#tokens=1000 #delay=0.02"}], "max_tokens": 9},
        ),
        ("/completions", {"prompt": "#tokens=1000 #delay=0.02"}),
    ],
)
def test_a_client_that_leaves_stops_the_upstream_and_is_recorded(
    proxy: Proxy, vllm: ScriptedVllm, path: str, body: Any
) -> None:
    with proxy.http.stream("POST", path, json={"model": "agent", "stream": True, **body}) as answer:
        for _, _ in zip(answer.iter_lines(), range(20), strict=False):
            pass
    eventually(lambda: vllm.aborted == 1)
    eventually(lambda: proxy.last_call().state == CallState.ABORTED)
    assert set(unpack_ids(proxy.last_call().choices[0].token_ids)) == {120}
    assert (proxy.last_call().trajectory_id == "run-7") == path.startswith("/t/")


def test_a_missing_key_is_an_error_in_the_format_of_the_dialect(start: Start) -> None:
    from ratchet.proxy.api_keys import hash_key

    proxy = start(key_hashes=frozenset({hash_key(b"good")}))
    errors = {path: proxy.http.post(path, json={}).json() for path in ("/v1/messages", "/v1/responses")}
    assert errors["/v1/messages"]["error"]["type"] == "authentication_error"
    assert errors["/v1/responses"]["error"]["code"] == "invalid_api_key"
    with anthropic.Anthropic(base_url=proxy.url, api_key="good", max_retries=0) as client:
        request: Any = {"model": "agent", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        assert client.messages.create(**request).content


@pytest.mark.slow
async def test_an_agent_of_the_agents_sdk_completes_its_loop(proxy: Proxy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the SDK's own imports
        import agents

    @agents.function_tool
    def search(q: str, n: int) -> str:
        """Search."""
        return f"#say=found.{n}.{q}"

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="k", max_retries=0) as client:
        model = agents.OpenAIResponsesModel("agent", client)
        agent = agents.Agent(name="a", instructions="use tools", tools=[search], model=model)
        result = agents.Runner.run_streamed(agent, "#think=hm #tool=search")
        kinds = [event.type async for event in result.stream_events()]
    assert result.final_output == "found 2 budget"
    assert "run_item_stream_event" in kinds
    async with httpx.AsyncClient(base_url=proxy.url) as http:
        while (await http.get("/health/backlog")).json()["unshipped_records"]:
            pass
    calls = proxy.store.calls.page(5)
    assert [call.linked_by for call in calls] == ["graph+tool_ids", "root"]
    assert len({call.trajectory_id for call in calls}) == 1
