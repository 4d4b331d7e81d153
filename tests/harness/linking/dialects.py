"""Traffic of the linking campaign in Completions, Responses and Messages."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.linking.kinds import TrafficKind
from tests.harness.linking.traffic import AgentRun, Json, say

_RESPONSES, _MESSAGES, _COMPLETIONS = "/v1/responses", "/v1/messages", "/v1/completions"
_PARAMETERS: Json = {"type": "object", "properties": {}}


async def responses(run: AgentRun) -> None:
    """The whole conversation as items in every call; reasoning is dropped now and then."""
    items: list[Json] = [{"role": "user", "content": "Look #tool=search #think=hm"}]
    tools = [{"type": "function", "name": "search", "parameters": _PARAMETERS}]
    before = None
    for _ in range(4):
        reply = await run.call(_RESPONSES, {"model": "agent", "input": items, "tools": tools}, before)
        kept = [i for i in reply.body["output"] if i["type"] != "reasoning" or run.traffic.rng.random() < 0.5]
        calls = [i for i in kept if i["type"] == "function_call"]
        out = [{"type": "function_call_output", "call_id": c["call_id"], "output": "none #tool=search"} for c in calls]
        items = [*items, *kept, *out]
        before = reply.label


async def previous_responses(run: AgentRun) -> None:
    """Equal texts; only the id of the previous response distinguishes trajectories. Instructions change."""
    before, previous = None, None
    for turn in range(4):
        body: Json = {"model": "agent", "input": say("the same for all"), "previous_response_id": previous}
        if turn % 2:
            body["instructions"] = f"This is turn {turn}."
        reply = await run.call(_RESPONSES, body, before)
        before, previous = reply.label, reply.body["id"]


async def messages(run: AgentRun) -> None:
    """Anthropic's blocks: thinking, tools, results first in the user's turn."""
    body: Json = {"model": "agent", "max_tokens": 99, "system": "Look.", "thinking": {"type": "adaptive"}}
    body["tools"] = [{"name": "search", "input_schema": _PARAMETERS}]
    transcript: list[Json] = [{"role": "user", "content": "Look #tool=search #think=hm"}]
    before = None
    for turn in range(4):
        reply = await run.call(_MESSAGES, {**body, "messages": transcript}, before)
        blocks = [b for b in reply.body["content"] if b["type"] != "thinking" or run.traffic.rng.random() < 0.5]
        turn_back: list[Json] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"none {turn}"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        turn_back.append({"type": "text", "text": "#tool=search #think=hm"})
        transcript = [*transcript, {"role": "assistant", "content": blocks}, {"role": "user", "content": turn_back}]
        before = reply.label


async def completions(run: AgentRun) -> None:
    """One text that grows."""
    text = f"Question {run.name}\nThought: {say('look')}"
    before = None
    for turn in range(4):
        reply = await run.call(_COMPLETIONS, {"model": "agent", "prompt": text}, before)
        text += f"{reply.body['choices'][0]['text']}\nObservation: {turn}\nThought: {say('look on')}"
        before = reply.label


async def mixed(run: AgentRun) -> None:
    """One conversation through three dialects: Messages, Responses, Chat."""
    first = [{"role": "user", "content": f"Mixed {run.name}"}]
    one = await run.call(_MESSAGES, {"model": "agent", "max_tokens": 99, "messages": first})
    second: list[Any] = [*first, {"role": "assistant", "content": one.body["content"][0]["text"]}]
    second.append({"role": "user", "content": "and?"})
    two = await run.call(_RESPONSES, {"model": "agent", "input": second}, one.label)
    third = [*second, {"role": "assistant", "content": two.body["output"][0]["content"][0]["text"]}]
    await run.chat([*third, {"role": "user", "content": json.dumps({"and": "on"})}], two.label)


DIALECT_KINDS = (
    TrafficKind("Responses, items", responses),
    TrafficKind("Responses, previous id", previous_responses, 64),
    TrafficKind("Messages", messages),
    TrafficKind("Completions", completions),
    TrafficKind("three dialects in a run", mixed),
)
