"""Every dialect on the real vLLM, through the vendors' own SDKs: answered in its own shape, captured with ids."""

from __future__ import annotations

import json
import socket
import time
from itertools import islice
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.demo.email_search.agent import TOOLS, opening
from ratchet.store.store import open_store
from tests.harness.cli.project import Project, wait_for

SYSTEM, QUESTION = (message["content"] for message in opening("Where is the picnic that Alice wrote about?", 6))
GREEDY = {"temperature": 0}
MOST = 64


@pytest.fixture
def url(project: Project) -> str:
    return str(project.running()["proxy_url"])


def by_chat(url: str, streamed: bool) -> tuple[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tools: Any = list(TOOLS)
    ask: dict[str, Any] = {"model": "mail", "messages": messages, "tools": tools, "max_tokens": MOST, **GREEDY}
    if streamed:
        with client.chat.completions.stream(**ask) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**ask).choices[0].message
    call = message.tool_calls[0]
    return call.function.name, call.function.arguments


def by_messages(url: str, streamed: bool) -> tuple[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key="x")
    tools: Any = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    messages: Any = [{"role": "user", "content": QUESTION}]
    ask: dict[str, Any] = {"model": "mail", "system": SYSTEM, "messages": messages, "tools": tools}
    ask |= {"max_tokens": MOST, "extra_body": GREEDY}
    if streamed:
        with client.messages.stream(**ask) as stream:
            block: Any = stream.get_final_message().content[-1]
    else:
        block = client.messages.create(**ask).content[-1]
    return block.name, block.input


def by_responses(url: str, streamed: bool) -> tuple[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    tools: Any = [
        {"type": "function", "name": t["function"]["name"], "parameters": t["function"]["parameters"], "strict": False}
        for t in TOOLS
    ]
    ask: dict[str, Any] = {"model": "mail", "instructions": SYSTEM, "input": QUESTION, "tools": tools}
    ask |= {"max_output_tokens": MOST, **GREEDY}
    if streamed:
        with client.responses.stream(**ask) as stream:
            item: Any = stream.get_final_response().output[-1]
    else:
        item = client.responses.create(**ask).output[-1]
    return item.name, item.arguments


@pytest.mark.e2e
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_chat, by_messages, by_responses])
def test_a_tool_call_comes_back_in_every_dialect_and_is_captured(
    project: Project, url: str, ask: Any, streamed: bool
) -> None:
    started = time.time()
    name, arguments = ask(url, streamed)
    assert name == "search_inbox"
    assert "picnic" in str(arguments)
    store = open_store(str(project.state / "store.db"))
    dialect = ask.__name__.removeprefix("by_")

    def captured() -> list[Any]:
        calls = [call for call in store.calls.page() if call.started_at >= started]
        return [c for c in calls if (c.dialect, c.streamed, str(c.state)) == (dialect, streamed, "answered")]

    wait_for("the call is in the store", lambda: bool(captured()))
    call = captured()[0]
    store.close()
    assert (call.untrainable, call.prompt_tokens) == (None, len(call.prompt_ids) // 4)
    assert len(call.choices[0].token_ids) == len(call.choices[0].logprobs) == 4 * call.completion_tokens > 0


@pytest.mark.e2e
def test_text_completions_and_token_counts_are_answered_too(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    assert client.completions.create(model="mail", prompt="Where is", max_tokens=4).usage is not None
    counted = anthropic.Anthropic(base_url=url, api_key="x").messages.count_tokens(
        model="mail", messages=[{"role": "user", "content": QUESTION}]
    )
    assert counted.input_tokens > 5
    assert httpx.get(f"{url}/health/ready").status_code == 200


@pytest.mark.e2e
def test_the_engine_continues_the_final_assistant_text_of_a_messages_call(project: Project, url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="x")
    prefix = '<tool_call>\n{"name": "return_final_answer'
    history: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": prefix}]
    answer: Any = client.messages.create(
        model="mail", system=SYSTEM, messages=history, max_tokens=MOST, extra_body=GREEDY
    )
    counted = client.messages.count_tokens(model="mail", system=SYSTEM, messages=history)
    assert counted.input_tokens == answer.usage.input_tokens
    text = prefix + answer.content[0].text
    assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "return_final_answer"
    history = [history[0], {"role": "assistant", "content": text}, {"role": "user", "content": "Are you sure?"}]
    client.messages.create(model="mail", system=SYSTEM, messages=history, max_tokens=MOST, extra_body=GREEDY)
    wait_for("its calls are in the store", lambda: httpx.get(f"{url}/health/backlog").json()["unshipped_records"] == 0)
    store = open_store(str(project.state / "store.db"))
    second, first = store.calls.page(2)
    store.close()
    assert (second.parent_call, second.linked_by, second.context) == (first.id, "graph", "exact")


def post_without_reading(url: str, body: dict[str, Any]) -> socket.socket:
    """A chat call that has been sent; closing the socket is leaving."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body)
    head = ("POST /v1/chat/completions HTTP/1.1", f"host: {host}", f"content-length: {len(content)}")
    sent = socket.create_connection((host, int(port)))
    sent.sendall("\r\n".join((*head, "content-type: application/json", "", content)).encode())
    return sent


def leave(url: str, body: dict[str, Any]) -> None:
    """Ask, and go away: after ten events of a stream, or as soon as the proxy has forwarded a whole call."""
    if body["stream"]:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data:"))
            assert len(list(islice(events, 10))) == 10  # the first one brings no token
        return

    def forwarded() -> bool:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return any(line.startswith("ratchet_upstream_in_flight{") and line.endswith(" 1.0") for line in lines)

    with post_without_reading(url, body):
        given_up = time.monotonic() + 3
        while not forwarded() and time.monotonic() < given_up:
            pass


@pytest.mark.e2e
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_stops_the_engine_and_what_was_generated_is_recorded(
    project: Project, url: str, streamed: bool
) -> None:
    store = open_store(str(project.state / "store.db"))
    body = {"model": "mail", "stream": streamed, "max_tokens": 900, "ignore_eos": True}

    def left(seed: int) -> Any:
        # By a name of its own: a call that was made before, also by another test, may reach the store later.
        name = f"left-{streamed}-{seed}"
        text = {"messages": [{"role": "user", "content": f"Where? {seed}"}], "metadata": {"trajectory_id": name}}
        leave(url, body | text | {"seed": seed})
        found: list[Any] = []

        def recorded() -> bool:
            found[:] = [call for call in store.calls.page(trajectory=name) if call.state != "started"]
            return bool(found)

        wait_for("the call is in the store", recorded)
        return found[0]

    # On two cores a busy engine can keep this client from leaving until all is generated: then the client tries again.
    calls = (left(seed) for seed in range(8))
    short = (call for call in calls if all(len(choice.token_ids) < 4 * 900 for choice in call.choices))
    call = next((call for call in short if call.state == "aborted"), None)
    store.close()
    assert call is not None
    assert (call.status, call.error) == (499, "the client disconnected")
    assert (len(call.choices) == 1) == streamed
    assert all(0 < len(choice.token_ids) == len(choice.logprobs) for choice in call.choices)
