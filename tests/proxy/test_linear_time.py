"""Reading a request takes time linear in its bytes, in every dialect and at each of its bounds.

A request of 16 times the size may take up to 48 times as long, since it no longer fits into the processor's caches;
what grows with the square takes up to 256 times. Measured is this process's time on processors, the least of a few
tries, each with other texts.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from backports import zstd

from ratchet.proxy.coordinator.conversations.conversation_cache import ConversationCache
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.dialects.anthropic_messages import Messages
from ratchet.proxy.dialects.chat import Chat
from ratchet.proxy.dialects.completions import Completions
from ratchet.proxy.dialects.dialect import Dialect
from ratchet.proxy.dialects.responses import Responses
from ratchet.proxy.dialects.responses_renderer import response_id
from ratchet.proxy.dialects.vllm_fields import with_one_system_message
from ratchet.proxy.errors import BodyTooLarge
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.worker.http.decompression import decompressed_body
from ratchet.store.store import Store
from tests.harness.records import call_start

Body = dict[str, Any]

MESSAGES, TOOLS = 10_000, 1_000  # the bounds by default
VALUES = 2_000_000  # ten times the bound by default
BOUNDS = BodyBounds(64 * 2**20, MESSAGES, TOOLS, 100, VALUES)
PARTS = 40_000  # parts of one message
WORDS = "SALT as far as I can see, nothing of it is new. " * 12
SHORT = "SALT, and so on"
TEXT: Body = {"type": "text", "text": SHORT}
SCHEMA: Body = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": SHORT} for n in range(10)}}

_salts = itertools.count(1000)


def message(role: str, content: Any = WORDS) -> Body:
    return {"role": role, "content": content}


def called(number: int) -> Body:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": json.dumps({"q": SHORT})}}


def function(number: int) -> Body:
    return {"name": f"f{number}", "description": SHORT, "parameters": SCHEMA}


def removal(number: int) -> Body:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": f"f{number}"}}


def in_a_row(item: Body) -> Callable[[int], Body]:
    return lambda n: {"input": [item] * n}


def wide(count: int) -> Body:
    return {"type": "object", "title": SHORT, "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


USER = message("user", SHORT)
CHAT: dict[str, tuple[int, Callable[[int], Body]]] = {
    "turns": (MESSAGES, lambda n: {"messages": [message("user"), message("assistant")] * (n // 2)}),
    "first system messages": (MESSAGES, lambda n: {"messages": [message("system")] * n}),
    "system messages after the user": (MESSAGES, lambda n: {"messages": [USER, *[message("developer")] * (n - 1)]}),
    "system messages in between": (MESSAGES, lambda n: {"messages": [message("user"), message("system")] * (n // 2)}),
    "parts": (PARTS, lambda n: {"messages": [message("user", [TEXT] * n)]}),
    "system parts": (PARTS, lambda n: {"messages": [USER, message("system", [TEXT] * n)]}),
    "calls": (PARTS, lambda n: {"messages": [message("assistant") | {"tool_calls": [called(i) for i in range(n)]}]}),
    "tools": (TOOLS, lambda n: {"tools": [{"type": "function", "function": function(i)} for i in range(n)]}),
    "allowed tools": (
        TOOLS,
        lambda n: {
            "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]},
            },
        },
    ),
    "a schema": (
        PARTS * 2, lambda n: {"tools": [{"type": "function", "function": {"name": "f", "parameters": wide(n)}}]},
    ),
    "values": (VALUES - 100, lambda n: {"unknown": [1] * n}),
    "a number": (10**6, lambda n: {"unknown": ["7" * n]}),
    "a text": (8 * 10**6, lambda n: {"messages": [message("user", SHORT * (n // len(SHORT)))]}),
    "arguments": (
        10**6,
        lambda n: {
            "messages": [
                message("assistant")
                | {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps(["x\n"] * (n // 8))}}]}
            ]
        },
    ),
}  # fmt: skip
USED = {"type": "tool_use", "id": "c", "name": "look", "input": {"q": SHORT}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, {"type": "tool_reference", "tool_name": "f"}]}
PAPER = {"type": "document", "title": SHORT, "source": {"type": "content", "content": [TEXT]}}
ANTHROPIC: dict[str, tuple[int, Callable[[int], Body]]] = {
    "answers in a row": (MESSAGES, lambda n: {"messages": [message("assistant", [TEXT, USED])] * n}),
    "texts in a row": (MESSAGES, lambda n: {"messages": [message("assistant")] * n}),
    "thoughts in a row": (
        MESSAGES, lambda n: {"messages": [message("assistant", [{"type": "thinking", "thinking": WORDS}])] * n},
    ),
    "questions in a row": (MESSAGES, lambda n: {"messages": [message("user", [TEXT, TEXT])] * n}),
    "first system messages": (MESSAGES, lambda n: {"messages": [message("system")] * n}),
    "system messages after the user": (MESSAGES, lambda n: {"messages": [USER, *[message("system")] * (n - 1)]}),
    "system messages in between": (MESSAGES, lambda n: {"messages": [message("user"), message("system")] * (n // 2)}),
    "system blocks": (PARTS, lambda n: {"system": [TEXT] * n}),
    "blocks": (PARTS, lambda n: {"messages": [message("user", [TEXT] * n)]}),
    "calls": (PARTS, lambda n: {"messages": [message("assistant", [USED] * n)]}),
    "results": (PARTS, lambda n: {"messages": [message("user", [RESULT] * n)]}),
    "documents": (PARTS, lambda n: {"messages": [message("user", [PAPER] * n)]}),
    "tools": (TOOLS, lambda n: {"tools": [{"name": f"f{i}", "input_schema": SCHEMA} for i in range(n)]}),
    "changes of tools": (
        MESSAGES,
        lambda n: {
            "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(n // 10)],
            "messages": [USER, *(message("system", [removal(i % (n // 10))]) for i in range(n - 1))],
        },
    ),
    "a schema": (PARTS * 2, lambda n: {"tools": [{"name": "f", "input_schema": wide(n)}]}),
    "a format": (PARTS * 2, lambda n: {"output_config": {"format": {"type": "json_schema", "schema": wide(n)}}}),
}  # fmt: skip
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": WORDS}]}
ITEMS: dict[str, Body] = {
    "answers": message("assistant"),
    "thoughts": THOUGHT,
    "calls": {"type": "function_call", "call_id": "c", "name": "look", "arguments": json.dumps({"q": WORDS})},
    "custom calls": {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": WORDS},
    "shell calls": {"type": "local_shell_call", "call_id": "c", "action": {"command": [WORDS]}},
    "searches": {"type": "web_search_call", "action": {"query": WORDS}},
    "results": {"type": "function_call_output", "call_id": "c", "output": WORDS},
    "questions": message("user"),
    "developer messages": message("developer"),
}
RESPONSES: dict[str, tuple[int, Callable[[int], Body]]] = {
    **{f"{name} in a row": (MESSAGES, in_a_row(item)) for name, item in ITEMS.items()},
    "developer messages after the user": (MESSAGES, lambda n: {"input": [USER, *[message("developer")] * (n - 1)]}),
    "parts": (PARTS, lambda n: {"input": [message("user", [TEXT] * n)]}),
    "output parts": (PARTS, lambda n: {"input": [message("assistant", [TEXT] * n)]}),
    "tools": (TOOLS, lambda n: {"tools": [{"type": "function", **function(i)} for i in range(n)]}),
    "a namespace": (
        PARTS,
        lambda n: {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom", "name": "f"}] * n}]},
    ),
    "allowed tools": (
        PARTS,
        lambda n: {
            "tools": [
                {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": f"f{i}"} for i in range(n)]}
            ],
            "tool_choice": {"type": "allowed_tools", "tools": [{"name": f"f{i}"} for i in range(n)]},
        },
    ),
    "a format": (
        PARTS * 2, lambda n: {"text": {"format": {"type": "json_schema", "name": "a", "schema": wide(n)}}},
    ),
}  # fmt: skip
COMPLETIONS: dict[str, tuple[int, Callable[[int], Body]]] = {
    "prompts": (PARTS * 2, lambda n: {"prompt": [SHORT] * n}),
    "ids": (VALUES - 100, lambda n: {"prompt": [7] * n}),
    "a text": (8 * 10**6, lambda n: {"prompt": SHORT * (n // len(SHORT))}),
}
DIALECTS: dict[str, tuple[Dialect, dict[str, tuple[int, Callable[[int], Body]]], Body]] = {
    "chat": (Chat(BOUNDS), CHAT, {"messages": [USER]}),
    "messages": (Messages(BOUNDS), ANTHROPIC, {"messages": [USER], "max_tokens": 9}),
    "responses": (Responses(None, BOUNDS), RESPONSES, {"input": [USER]}),  # type: ignore[arg-type]
    "completions": (Completions(BOUNDS), COMPLETIONS, {"prompt": SHORT}),
}
CASES = [(dialect, case) for dialect, (_, cases, _) in DIALECTS.items() for case in cases]
PACKED: dict[str, tuple[int, Callable[[int], bytes]]] = {
    **{
        f"{name}, {what}": made
        for name, pack in (("gzip", gzip.compress), ("zstd", zstd.compress))
        for what, made in {
            "empty parts": (4096, lambda n, pack=pack: pack(b"") * n),
            "small parts": (4096, lambda n, pack=pack: pack(b"SALT") * n),
            "one part": (32 * 2**20, lambda n, pack=pack: pack(b" " * n)),
            "what cannot be packed": (8 * 2**20, lambda n, pack=pack: pack(random.randbytes(n))),
        }.items()
    },
    "zstd, empty blocks": (10**6, lambda n: zstd.compress(b"")[:-3] + b"\0\0\0" * n + b"\1\0\0"),
}


def least_seconds(run: Callable[[bytes], object], body: bytes) -> float:
    """Return the least time on processors that one of three runs takes, each with another body of the same size.

    Without garbage collections, whose number depends on what other tests left in memory.
    """
    taken = []
    for _ in range(3):
        salted = body.replace(b"SALT", b"%04d" % (next(_salts) % 10_000))
        gc.collect()
        gc.disable()
        try:
            started = time.process_time()
            run(salted)
            taken.append(time.process_time() - started)
        finally:
            gc.enable()
    return min(taken)


def check_linear(run: Callable[[bytes], object], small: bytes, large: bytes) -> None:
    """Check that `large`, of 16 times the size, takes no more than 48 times as long."""
    seconds = least_seconds(run, small), least_seconds(run, large)
    assert seconds[1] < 48 * max(seconds[0], 0.002), seconds


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "case"), CASES)
def test_reading_takes_time_linear_in_the_bytes(dialect: str, case: str) -> None:
    reader, cases, whole = DIALECTS[dialect]
    bound, make = cases[case]

    def read(body: bytes) -> None:
        request = asyncio.run(reader.read(body, f"key_{body[:200]!r}")).request
        with_one_system_message(request).outgoing("served")

    bodies = [json.dumps({"model": "agent", **whole, **make(n)}).encode() for n in (bound // 16, bound)]
    check_linear(read, *bodies)


@pytest.mark.slow
@pytest.mark.parametrize("case", PACKED)
def test_decompressing_takes_time_linear_in_the_bytes(case: str) -> None:
    bound, make = PACKED[case]

    def read(body: bytes) -> None:
        decompressed_body(body, BOUNDS.body, case.partition(",")[0])

    check_linear(read, make(bound // 16), make(bound))


@pytest.mark.slow
def test_reading_references_takes_time_linear_in_their_number(store: Store) -> None:
    memory = ConversationCache(store, RecordLookups(store), 2**28, 2**28)
    dialect, previous = Responses(memory, BOUNDS), None
    for count in (200, 3200):
        calls = [called(number) for number in range(count)]
        start = call_start(f"call_{count}", "t1", key_id="k1")
        memory.add_response(start, [USER, message("assistant") | {"tool_calls": calls}], previous)
        previous = asyncio.run(memory.find_turn(response_id(start.call_id), "k1"))

    def refer(count: int) -> bytes:
        items = [{"type": "item_reference", "id": f"fc_{count}_{place}"} for place in range(1, count)]
        return json.dumps({"model": "agent", "input": items}).encode()

    check_linear(lambda body: asyncio.run(dialect.read(body, "k1")), refer(200), refer(3200))
    repeated = {"type": "item_reference", "id": "msg_3200_0"}
    body = {"model": "agent", "input": [repeated] * MESSAGES}
    with pytest.raises(BodyTooLarge, match="max_body_bytes"):
        asyncio.run(Responses(memory, replace(BOUNDS, body=2**20)).read(json.dumps(body).encode(), "k1"))
