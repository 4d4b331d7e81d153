"""OpenAI's SDK, Chat Completions, with `azure` over Azure OpenAI's paths: the tool loop of its own documentation."""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import AzureOpenAI, OpenAI

import mailbox


def agent(task: mailbox.Task) -> str | None:
    client = azure() if sys.argv[1:] == ["azure"] else OpenAI()
    system = {"role": "system", "content": task["system"]}
    messages: list[Any] = [system, {"role": "user", "content": task["question"]}]
    for _ in range(task.get("rounds", 8)):
        options = {"model": mailbox.MODEL, "messages": messages, "tools": task["tools"], **task["options"]}
        message = streamed(client, options) if task["streamed"] else whole(client, options)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            reply = mailbox.take(task, call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})
    return None


def azure() -> AzureOpenAI:
    endpoint = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    return AzureOpenAI(azure_endpoint=endpoint, api_key="x", api_version="2024-10-21")


def whole(client: OpenAI, options: dict[str, Any]) -> Any:
    return client.chat.completions.create(**options).choices[0].message


def streamed(client: OpenAI, options: dict[str, Any]) -> Any:
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


if __name__ == "__main__":
    mailbox.answer(agent, "openai")
