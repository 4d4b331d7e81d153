"""exact_context on the real vLLM: ten turns of tool calls under a template that rewrites history are one sequence."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.store.content.token_sequences import sampled_spans, sequences, token_call
from ratchet.store.records import Call, unpack_ids
from ratchet.store.store import open_store
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.servers import eventually
from tests.harness.records import commit_round
from tests.harness.vllm.engine import vllm
from tests.harness.vllm.rewriting_model import TOOL, Model, make

# What the agent says before each call, whether a tool must be called then, and what else it asks for.
TURNS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("user", "Find the mail about Paris", "required", {}),
    ("tool", "3 found: a, b, c", "required", {}),
    ("tool", 'nothing {"x": 1}', "required", {}),
    ("tool", "empty", "none", {}),
    ("user", "And about the picnic?", "required", {}),
    ("tool", "1 found", "none", {}),
    ("user", "What is in it?", "none", {"max_tokens": 12}),
    ("user", "Shorter, please", "none", {"stop": ["e"]}),
    ("user", "Search more", "required", {}),
    ("tool", "done", "none", {}),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Model]]:
    """A real vLLM with the model that rewrites history."""
    folder = tmp_path_factory.mktemp("rewriting")
    model = make(folder)
    with vllm(model.folder, folder / "vllm.log", "--reasoning-parser", "qwen3") as url:
        yield url, model


@contextlib.contextmanager
def proxied(url: str, **settings: Any) -> Iterator[Proxy]:
    """A proxy before the engine, with a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"{folder}/store.db")
        try:
            with running(url, store, Path(folder), **settings) as proxy:
                yield proxy
        finally:
            store.close()


def converse(agent: openai.OpenAI, model: Model, *, streamed: bool, thinks: bool, keeps: bool) -> None:
    """Let an agent go through the turns; `keeps`: it sends its reasoning back."""
    messages: list[Any] = [{"role": "system", "content": "You are an agent"}]
    for seed, (role, text, tool_choice, more) in enumerate(TURNS):
        texts = {"role": role, "content": text}
        messages.append(texts if role == "user" else {**texts, "tool_call_id": messages[-1]["tool_calls"][0]["id"]})
        ask: dict[str, Any] = {
            "model": "agent", "messages": messages, "tools": [TOOL], "tool_choice": tool_choice, "max_tokens": 160,
            "parallel_tool_calls": False, "seed": seed, "logit_bias": model.bias,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}}, **more,
        }  # fmt: skip
        if streamed:
            answer = _streamed(agent, ask)
        else:
            answer = agent.chat.completions.create(**ask).choices[0].message.model_dump(exclude_none=True)
        names = ("role", "content", "tool_calls", *(["reasoning"] if keeps else []))
        messages.append({name: answer[name] for name in names if name in answer})


def _streamed(agent: openai.OpenAI, ask: dict[str, Any]) -> dict[str, Any]:
    """Return a streamed message; its text is put together by hand, as the SDK refuses a tool call cut by length."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    calls: dict[int, dict[str, Any]] = {}
    with agent.chat.completions.create(**ask, stream=True) as events:
        for delta in (choice.delta.model_dump(exclude_none=True) for event in events for choice in event.choices):
            for name in ("content", "reasoning"):
                message[name] += delta.get(name, "")
            for part in delta.get("tool_calls", ()):
                function = {"name": "", "arguments": ""}
                call = calls.setdefault(part["index"], {"id": part.get("id"), "type": "function", "function": function})
                for name in function:
                    call["function"][name] += part["function"].get(name) or ""
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def recorded(proxy: Proxy) -> list[Call]:
    """Return the calls, oldest first."""
    proxy.settled()
    return sorted(proxy.store.calls.page(limit=100), key=lambda call: call.started_at)


def assert_one_sequence(calls: list[Call]) -> None:
    """Every call continues the one before it, id for id, and every sampled id is where the engine put it."""
    assert [call.context for call in calls] == ["root"] + ["exact"] * (len(calls) - 1)
    assert {call.trajectory_id for call in calls} == {calls[0].trajectory_id}
    assert [call.untrainable for call in calls] == [None] * len(calls)
    last = (calls[-1].id, 0)
    whole, spans = sequences(map(token_call, calls))[last], sampled_spans(calls, last)
    assert [whole[4 * a : 4 * b] for a, b in spans] == [call.choices[0].token_ids for call in calls]


@pytest.mark.e2e
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("thinks", "keeps"), [(True, True), (True, False), (False, False)])
def test_ten_turns_of_tool_calls_are_one_exact_sequence(
    engine: tuple[str, Model], thinks: bool, keeps: bool, streamed: bool
) -> None:
    url, model = engine
    with proxied(url) as proxy:
        converse(proxy.agent(), model, streamed=streamed, thinks=thinks, keeps=keeps)
        assert_one_sequence(recorded(proxy))


@pytest.mark.e2e
def test_with_an_adapter_too(engine: tuple[str, Model]) -> None:
    url, model = engine
    with proxied(url) as proxy:
        commit_round(proxy.store, "agent", 1, checkpoint=str(model.adapter))
        proxy.store.policies.promote("agent", 1, {})
        eventually(
            lambda: any(
                d.live_versions.get("agent") == 1 for d in proxy.store.proxy_instances.running("agent", time.time() - 2)
            )
        )
        for streamed in (False, True):
            converse(proxy.agent(), model, streamed=streamed, thinks=True, keeps=True)
        calls = recorded(proxy)
        assert {call.version for call in calls} == {1}
        assert_one_sequence(calls[:10])
        assert_one_sequence(calls[10:])


@pytest.mark.e2e
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", ["replace", "append"])
def test_under_a_prompt_that_is_swapped_in_too(engine: tuple[str, Model], mode: str, streamed: bool) -> None:
    url, model = engine
    with proxied(url) as proxy:
        prompt = proxy.store.prompts.register("Search the inbox first.", mode)
        made = proxy.store.policies.register_prompt_version("agent", prompt.id, {})
        proxy.store.policies.promote("agent", made.version, {})
        eventually(
            lambda: any(
                d.live_versions.get("agent") == 1 for d in proxy.store.proxy_instances.running("agent", time.time() - 2)
            )
        )
        converse(proxy.agent(), model, streamed=streamed, thinks=True, keeps=False)
        calls = recorded(proxy)
        assert {call.version for call in calls} == {1}
        assert_one_sequence(calls)
        text = proxy.store.trajectories.read(calls[0].trajectory_id).messages[0]
        assert text["content"] == "You are an agent"
        body = {"model": _base(url), "tokens": unpack_ids(calls[0].prompt_ids)}
        sent = httpx.post(f"{url}/detokenize", json=body, timeout=60).json()["prompt"]
        assert ("You are an agent" in sent, "Search the inbox first." in sent) == (mode == "append", True)


def _base(url: str) -> str:
    """Return the name that vLLM knows the base model by."""
    return str(httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"])


@pytest.mark.e2e
def test_plain_chat_forks_at_nearly_every_turn(engine: tuple[str, Model]) -> None:
    url, model = engine
    with proxied(url, exact_context="off") as proxy:
        converse(proxy.agent(), model, streamed=False, thinks=True, keeps=True)
        assert [call.context for call in recorded(proxy)].count("exact") <= 1


@pytest.mark.e2e
def test_messages_stays_exact_although_its_clients_lose_the_spacing_of_arguments(engine: tuple[str, Model]) -> None:
    url, model = engine
    with proxied(url) as proxy:
        client = anthropic.Anthropic(base_url=proxy.url, api_key="x")
        tools: Any = [{"name": "search_inbox", "input_schema": TOOL["function"]["parameters"], "strict": True}]
        messages: list[Any] = [{"role": "user", "content": "Find the mail"}]
        for seed in range(4):
            ask: dict[str, Any] = {"model": "agent", "max_tokens": 160, "messages": messages, "tools": tools}
            ask |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
            ask |= {"extra_body": {"seed": seed, "logit_bias": model.bias}}
            [called] = [block for block in client.messages.create(**ask).content if block.type == "tool_use"]
            text = called.model_dump(include={"type", "id", "name", "input"})
            result = {"type": "tool_result", "tool_use_id": called.id, "content": "none"}
            messages += [{"role": "assistant", "content": [text]}, {"role": "user", "content": [result]}]
        client.close()
        assert_one_sequence(recorded(proxy))
