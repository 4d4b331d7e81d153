"""Anthropic's SDK, Messages: the tool loop that its own documentation shows."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic

import mailbox


def agent(task: mailbox.Task) -> str | None:
    client = Anthropic()
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    functions = [tool["function"] for tool in task["tools"]]
    tools = [
        {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]} for f in functions
    ]
    options = {"model": mailbox.MODEL, "system": task["system"], "tools": tools, "max_tokens": 1000}
    for _ in range(task.get("rounds", 8)):
        message = turn(client, task["streamed"], {**options, "messages": messages, **task["options"]})
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return message.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": mailbox.take(task, block.name)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return None


def turn(client: Anthropic, streamed: bool, options: dict[str, Any]) -> Any:
    if not streamed:
        return client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


if __name__ == "__main__":
    mailbox.answer(agent, "anthropic")
