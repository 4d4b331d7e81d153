"""LiteLLM as a client library: the provider names `hosted_vllm/` and `openai/` in front of the model."""

from __future__ import annotations

import gc
import sys
from typing import Any

import litellm

import mailbox

PROVIDER = sys.argv[1]

# LiteLLM leaves a streamed response open after `[DONE]`. If the garbage collector closes it while httpcore holds the
# lock of its connection pool, the thread waits for itself for ever. So garbage is collected between calls only.
gc.disable()


def agent(task: mailbox.Task) -> str | None:
    system = {"role": "system", "content": task["system"]}
    messages: list[Any] = [system, {"role": "user", "content": task["question"]}]
    where = {"model": f"{PROVIDER}/{mailbox.MODEL}", "api_base": mailbox.BASE_URL, "api_key": mailbox.KEY}
    for _ in range(8):
        answer: Any = litellm.completion(**where, messages=messages, tools=task["tools"], stream=task["streamed"])
        if task["streamed"]:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        gc.collect()
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            reply = mailbox.take(task, call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})
    return None


if __name__ == "__main__":
    mailbox.answer(agent, "litellm")
