"""Requests of the sizes that agents send: a tool loop with code in its results, a judge's prompt, sampled rollouts.

An agent's conversation has 20 tools and 40 turns of about 2.2 KB: a tool call with a line of code, and a piece of
source code as its result. Its text comes from the standard library, so that quotation marks, brackets and newlines
occur as often as in real code. Every conversation has its own text; the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

TURNS, TOOLS = 40, 20
JUDGE_BYTES = 100_000

Json = dict[str, Any]

_CODE = Path(argparse.__file__).read_text() + Path(string.__file__).read_text()
_SYSTEM = "You fix bugs in a repository. Read before you write, and run the tests after every change. " * 30


def tools() -> list[Json]:
    """Return 20 tool definitions, 12 KB."""
    name = {"type": "string", "description": "the path of the file, relative to the root of the repository"}
    lines = {"type": "integer", "description": "how many lines, from the first one on", "minimum": 1}
    parameters = {"type": "object", "properties": {"path": name, "lines": lines}, "required": ["path"]}
    return [
        {"type": "function", "function": {
            "name": f"tool_{number}",
            "description": f"Tool {number} reads or changes a part of the repository. " * 3,
            "parameters": parameters,
        }}
        for number in range(TOOLS)
    ]  # fmt: skip


def opening(chance: random.Random) -> list[Json]:
    """Return the first messages of a conversation."""
    task = f"Task {chance.getrandbits(64)}: the parser loses an argument that is repeated. Find out why, and mend it."
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]


def tool_call(chance: random.Random) -> Json:
    """Return an assistant message with one tool call."""
    arguments = {"path": f"src/module_{chance.randrange(1000)}.py", "text": _code(chance, 260)}
    function = {"name": f"tool_{chance.randrange(TOOLS)}", "arguments": json.dumps(arguments)}
    call = {"id": f"call_{chance.getrandbits(96):024x}", "type": "function", "function": function}
    return {"role": "assistant", "content": f"Step {chance.getrandbits(48)}: I look at it.", "tool_calls": [call]}


def tool_result(chance: random.Random, answer: Json) -> list[Json]:
    """Return what an agent adds after an answer: the result of each tool call, else a user's message."""
    text = f"{chance.getrandbits(48)} lines\n{_code(chance, 1_320)}"
    calls = answer.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
    return results or [{"role": "user", "content": text}]


def conversation(chance: random.Random, turns: int = TURNS) -> list[Json]:
    """Return a conversation that ends with a tool's result; 40 turns and the tools have 92 KB."""
    messages = opening(chance)
    for _ in range(turns):
        answer = tool_call(chance)
        messages += [answer, *tool_result(chance, answer)]
    return messages


def judge_prompt(chance: random.Random) -> list[Json]:
    """Return a judge's prompt: 100 KB of JSON that quotes a trajectory."""
    turns: list[Json] = []
    while len(json.dumps(turns)) < JUDGE_BYTES * 0.8:
        turns += conversation(chance, 4)[2:]
    transcript = json.dumps({"trajectory": turns, "number": chance.getrandbits(64)}, indent=1)[:JUDGE_BYTES]
    return [{"role": "system", "content": "Score the trajectory from 0 to 1."}, {"role": "user", "content": transcript}]


def short_prompt(chance: random.Random) -> list[Json]:
    """Return a prompt of 4 KB."""
    text = f"{chance.getrandbits(64)} " + "Find the message about the budget of the spring meeting. " * 40
    return [{"role": "system", "content": "You find messages in a mailbox and answer from them. " * 28},
            {"role": "user", "content": text}]  # fmt: skip


def body(
    messages: list[Json],
    offered: list[Json] | None = None,
    model: str = "agent",
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Return the request body as the OpenAI SDK writes it: the messages first, the tools last."""
    fields: Json = {"messages": messages, "model": model, "max_tokens": 512, "temperature": 1.0, **extra}
    if offered:
        fields["tools"] = offered
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def _code(chance: random.Random, length: int) -> str:
    start = chance.randrange(len(_CODE) - length)
    return _CODE[start : start + length]
