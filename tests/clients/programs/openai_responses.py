"""OpenAI's SDK, Responses: each turn names the previous response and sends only new items."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

import mailbox


def agent(task: mailbox.Task) -> str | None:
    client = OpenAI()
    items: Any = task["question"]
    previous: dict[str, str] = {}
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in task["tools"]]
    for _ in range(task.get("rounds", 8)):
        options = {"model": mailbox.MODEL, "instructions": task["system"], "input": items, "tools": tools, **previous}
        options |= task["options"]
        response = streamed(client, options) if task["streamed"] else client.responses.create(**options)
        previous = {"previous_response_id": response.id}
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items = [
            {"type": "function_call_output", "call_id": call.call_id, "output": mailbox.take(task, call.name)}
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
