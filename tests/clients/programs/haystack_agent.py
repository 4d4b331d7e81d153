"""Haystack: its Agent component over OpenAIChatGenerator."""

from __future__ import annotations

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

import mailbox


def agent(task: mailbox.Task) -> str:
    model = OpenAIChatGenerator(
        api_key=Secret.from_token(mailbox.KEY), model=mailbox.MODEL, api_base_url=mailbox.BASE_URL
    )
    tools = [create_tool_from_function(tool) for tool in mailbox.tools(task)]
    callback = (lambda chunk: None) if task["streamed"] else None
    mail = Agent(chat_generator=model, tools=tools, system_prompt=mailbox.SYSTEM, streaming_callback=callback)
    return str(mail.run(messages=[ChatMessage.from_user(task["question"])])["last_message"].text)


if __name__ == "__main__":
    mailbox.answer(agent, "haystack-ai")
