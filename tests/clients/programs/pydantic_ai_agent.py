"""Pydantic AI: an Agent over OpenAIChatModel."""

from __future__ import annotations

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import mailbox


async def agent(task: mailbox.Task) -> str:
    model = OpenAIChatModel(mailbox.MODEL, provider=OpenAIProvider(base_url=mailbox.BASE_URL, api_key=mailbox.KEY))
    mail = Agent(model, system_prompt=mailbox.SYSTEM, tools=list(mailbox.tools(task)))
    if not task["streamed"]:
        return str((await mail.run(task["question"])).output)
    async with mail.run_stream(task["question"]) as result:
        async for _ in result.stream_text():
            pass
        return str(await result.get_output())


if __name__ == "__main__":
    mailbox.answer(agent, "pydantic-ai-slim")
