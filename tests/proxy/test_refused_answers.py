"""A model that refuses, or a filter that ends an answer, is seen in every dialect; servers of other models do this."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from ratchet.store.store import open_store
from tests.harness.proxy.raw_upstream import RawUpstream, http, raw_upstream, stream
from tests.harness.proxy.running_proxy import Proxy, running

REFUSAL = "I cannot help."
HEAD: dict[str, Any] = {"id": "x", "created": 1, "model": "base"}


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with raw_upstream() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(upstream: RawUpstream, migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    store = open_store(str(folder / "store.db"))
    with running(upstream.url, store, folder) as one:
        yield one
    store.close()


def answers(upstream: RawUpstream, streamed: bool, finish: str, **message: str) -> None:
    """Let the upstream answer with a message, in two pieces if streamed."""
    if not streamed:
        whole = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish}
        upstream.answer = http(json.dumps({**HEAD, "object": "chat.completion", "choices": [whole]}).encode())
        return
    ((name, text),) = message.items()
    deltas = [{"role": "assistant", name: text[:3]}, {name: text[3:]}, {}]
    chunks = [
        {"index": 0, "delta": delta, "finish_reason": None if delta else finish} for delta in deltas
    ]  # fmt: skip
    upstream.answer = stream(
        *(json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [chunk]}).encode() for chunk in chunks)
    )


def responses(proxy: Proxy, streamed: bool) -> tuple[Any, list[Any]]:
    """Return the response, and the events of the stream."""
    if not streamed:
        return proxy.agent().responses.create(model="agent", input="hi"), []
    events: list[Any] = list(proxy.agent().responses.create(model="agent", input="hi", stream=True))
    return events[-1].response, events


def messages(proxy: Proxy, streamed: bool) -> Any:
    with anthropic.Anthropic(
        base_url=proxy.url, api_key="k", max_retries=0, timeout=20.0, _strict_response_validation=True
    ) as client:
        request: Any = {"model": "agent", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        if not streamed:
            return client.messages.create(**request)
        with client.messages.stream(**request) as events:
            return events.get_final_message()


def recorded(proxy: Proxy) -> Any:
    """Return the message of the last call in the store."""
    proxy.settled()
    return proxy.store.trajectories.read(proxy.store.calls.page(1)[0].trajectory_id).messages[-1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_a_part_of_its_own_and_recorded(proxy: Proxy, upstream: RawUpstream, streamed: bool) -> None:
    answers(upstream, streamed, "stop", refusal=REFUSAL)
    response, events = responses(proxy, streamed)
    ((part,),) = [item.content for item in response.output]
    assert (response.status, part.type, part.refusal) == ("completed", "refusal", REFUSAL)
    kinds = [event.type for event in events if "refusal" in event.type]
    assert kinds == (["response.refusal.delta"] * 2 + ["response.refusal.done"]) * streamed
    assert recorded(proxy)["refusal"] == REFUSAL
    answer = messages(proxy, streamed)
    assert (answer.stop_reason, [block.text for block in answer.content]) == ("refusal", [REFUSAL])


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_a_filter_ended_is_not_complete(proxy: Proxy, upstream: RawUpstream, streamed: bool) -> None:
    answers(upstream, streamed, "content_filter", content="The first")
    response, _ = responses(proxy, streamed)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "content_filter")
    assert (response.output_text, response.output[0].status) == ("The first", "incomplete")
    assert messages(proxy, streamed).stop_reason == "refusal"
