"""Pieces of tool calls are assembled once: the record and the clients of every dialect get the same calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.proxy.dialects.anthropic_messages import MessageRenderer
from ratchet.proxy.dialects.content_blocks import BlockEncoder
from ratchet.proxy.dialects.responses_renderer import ResponseRenderer
from ratchet.proxy.wire.capture import Capture
from ratchet.store.records import CallStarted

Json = dict[str, Any]
Call = tuple[str, str, str]  # id, name, arguments
START = CallStarted("call_1", "traj_1", 0.0, "agent", 0, "messages", True, "root", "")


def piece(index: int, call_id: str | None = None, name: str | None = None, arguments: str | None = None) -> Json:
    function = {"name": name, "arguments": arguments}
    return {
        "index": index,
        "id": call_id,
        "function": {key: text for key, text in function.items() if text is not None},
    }


def chunk(delta: Json, finish: str | None = None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode()


def recorded(pieces: Sequence[Json], text: str = "") -> list[Call]:
    """Return the calls of the record, and check that each dialect gives the same ones, in events and as a whole."""
    found = [give(dialect, pieces, text) for dialect in ("messages", "responses")]
    assert found[0] == found[1]
    return found[0]


def give(dialect: str, pieces: Sequence[Json], text: str) -> list[Call]:
    """Return the calls of the record; raise if the client of a dialect gets others."""
    capture = Capture("agent", asks_ids=False, asks_logprobs=False, asks_usage=False)
    renderer: Any
    if dialect == "messages":
        renderer = MessageRenderer(START, capture)
    else:
        renderer = ResponseRenderer(START, {}, frozenset(), {})
    encoder = BlockEncoder(capture, renderer)
    deltas: list[Json] = [{"tool_calls": [one]} for one in pieces]
    if text:
        deltas.insert(len(deltas) // 2, {"content": text})
    sent = b"".join(encoder.chunk(chunk(delta)) or b"" for delta in deltas)
    sent += encoder.chunk(chunk({}, "tool_calls")) or b""
    capture.is_done = True
    sent += encoder.end()
    message = capture.choices[0].message()
    assert message["content"] == (text or None)
    calls = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
    events = [json.loads(line[6:]) for line in sent.decode().splitlines() if line.startswith("data: ")]
    client = messages_calls(events) if dialect == "messages" else responses_calls(events)
    assert sorted(client) == sorted(calls)
    answer = renderer.answer()
    if dialect == "messages":
        assert [block["name"] for block in answer["content"] if block["type"] == "tool_use"] == [c[1] for c in client]
    else:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        assert [(item["call_id"], item["name"], item["arguments"]) for item in items] == client
    return calls


def messages_calls(events: Sequence[Json]) -> list[Call]:
    """Return the calls in Anthropic's events: one block open at a time, each complete when it is closed."""
    calls: list[Call] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, block = True, event["content_block"]
            if block["type"] == "tool_use":
                calls.append((block["id"], block["name"], ""))
        elif event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
            call_id, name, arguments = calls[-1]
            calls[-1] = call_id, name, arguments + event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop":
            is_open = False
    return calls


def responses_calls(events: Sequence[Json]) -> list[Call]:
    """Return the calls in the events of Responses; the deltas of each are its arguments."""
    deltas: dict[int, str] = {}
    calls: list[Call] = []
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
        elif event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
            item = event["item"]
            assert item["arguments"] == deltas.get(event["output_index"], "")
            calls.append((item["call_id"], item["name"], item["arguments"]))
    return calls


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Call], list[Json]]:
    """Draw calls, and the pieces in which a server sends them."""
    count = draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from(["look", "read_file", "add", "search.web"]), min_size=count, max_size=count))
    one_index = draw(st.booleans())
    values = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=3)
    calls = [(f"id-{place}", name, json.dumps(draw(values))) for place, name in enumerate(names)]
    own = [draw(pieces_of(0 if one_index else place, call)) for place, call in enumerate(calls)]
    # Calls alternate, unless the server tells them apart by nothing but their ids and names.
    if one_index and (len(set(names)) < count or any("id" not in one for pieces in own for one in pieces)):
        return calls, [one for pieces in own for one in pieces]
    merged: list[Json] = []
    places = [0] * count
    began = 0
    while True:
        left = [n for n in range(min(began + 1, count)) if places[n] < len(own[n])]
        if not left:
            return calls, merged
        chosen = draw(st.sampled_from(left))
        began = max(began, chosen + 1)
        merged.append(own[chosen][places[chosen]])
        places[chosen] += 1


@st.composite
def pieces_of(draw: st.DrawFn, index: int, call: Call) -> list[Json]:
    """Draw the pieces of one call."""
    call_id, name, arguments = call
    cuts = sorted(draw(st.sets(st.integers(1, len(arguments) - 1), max_size=4)))
    parts = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    how = draw(st.sampled_from(["once", "whole in each", "in parts", "after the id", "with the first arguments"]))
    always = draw(st.booleans())
    if how == "whole in each":
        pieces = [piece(index, call_id, name, part) for part in ["", *parts, ""]]
    elif how == "in parts":
        cut = draw(st.integers(1, len(name) - 1).filter(lambda at: name[:at] != name[at:]))
        pieces = [piece(index, call_id, name[:cut], ""), piece(index, None, name[cut:])]
        pieces += [piece(index, None, None, part) for part in parts]
    elif how == "after the id":
        pieces = [piece(index, call_id), piece(index, None, name)] + [piece(index, None, None, p) for p in parts]
    elif how == "with the first arguments":
        pieces = [piece(index, call_id, name, parts[0])] + [piece(index, None, None, part) for part in parts[1:]]
    else:
        pieces = [piece(index, call_id, name, "")] + [piece(index, None, None, part) for part in parts]
    for one in pieces:
        if always:
            one["id"] = call_id
        elif one["id"] is None:
            del one["id"]
    return pieces


@given(streams(), st.sampled_from(["", "\n", "some text"]))
def test_record_and_clients_get_the_calls_however_they_are_cut(drawn: tuple[list[Call], list[Json]], text: str) -> None:
    calls, pieces = drawn
    assert recorded(pieces, text) == calls


CALLS = [("a", "add", '{"x": 1}'), ("b", "mul", '{"y": 2}')]
KNOWN: dict[str, tuple[list[Json], list[Call]]] = {
    "parallel calls that all have index 0": (
        [piece(0, call_id, name, text) for call_id, name, text in CALLS],
        CALLS,
    ),
    "the same tool twice at index 0": (
        [piece(0, "a", "add", "{}"), piece(0, "b", "add", "{}")],
        [("a", "add", "{}"), ("b", "add", "{}")],
    ),
    "the whole name and a new id in each chunk (vLLM 0.7 with a named tool)": (
        [piece(0, f"chatcmpl-tool-{n}", "read_file", part) for n, part in enumerate(["", '{"p"', ": ", "1}"])],
        [("chatcmpl-tool-0", "read_file", '{"p": 1}')],
    ),
    "the name in pieces": (
        [piece(0, "a", "lo"), piece(0, None, "ok"), piece(0, None, None, "{}")],
        [("a", "look", "{}")],
    ),
    "the name after the id": ([piece(0, "a"), piece(0, None, "look", "{}")], [("a", "look", "{}")]),
    "no index": ([piece(0, "a", "add", "{}") | {"index": None}], [("a", "add", "{}")]),
    "arguments that are no JSON": (
        [piece(0, "a", "add", "{x"), piece(1, "b", "mul", "{}"), piece(0, None, None, "y}")],
        [("a", "add", "{xy}"), ("b", "mul", "{}")],
    ),
    "no arguments": ([piece(0, "a", "now"), piece(1, "b", "add", "{}")], [("a", "now", ""), ("b", "add", "{}")]),
}


@pytest.mark.parametrize("case", KNOWN)
def test_record_and_clients_get_the_calls_of_known_servers(case: str) -> None:
    pieces, calls = KNOWN[case]
    assert recorded(pieces) == calls


def test_a_call_is_streamed_while_it_arrives_and_the_next_one_after_it() -> None:
    capture = Capture("agent", asks_ids=False, asks_logprobs=False, asks_usage=False)
    encoder = BlockEncoder(capture, MessageRenderer(START, capture))

    def sent(*pieces: Json) -> str:
        return (encoder.chunk(chunk({"tool_calls": list(pieces)})) or b"").decode()

    assert "content_block_start" not in sent(piece(0, "a", "add"))
    assert sent(piece(0, None, None, '{"x"')).count("partial_json") == 1
    assert sent(piece(1, "b", "mul", "{}")) == ""  # the first one is not complete
    rest = sent(piece(0, None, None, ": 1}"))
    assert rest.index(": 1}") < rest.index("content_block_stop") < rest.index('"mul"')
