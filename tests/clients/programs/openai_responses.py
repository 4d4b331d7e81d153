"""OpenAI's SDK, Responses: each turn names the response before it and sends only what is new."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

import mailbox


def agent(asked: mailbox.Asked) -> str | None:
    client = OpenAI()
    given: Any = asked["question"]
    before: dict[str, str] = {}
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in asked["tools"]]
    for _ in range(asked.get("rounds", 8)):
        options = {"model": mailbox.MODEL, "instructions": asked["system"], "input": given, "tools": tools, **before}
        options |= asked["options"]
        response = streamed(client, options) if asked["streamed"] else client.responses.create(**options)
        before = {"previous_response_id": response.id}
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        given = [
            {"type": "function_call_output", "call_id": call.call_id, "output": mailbox.take(asked, call.name)}
            for call in calls
        ]
    return None


def streamed(client: OpenAI, options: dict[str, Any]) -> Any:
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


if __name__ == "__main__":
    mailbox.answer(agent, "openai")
