"""Strands Agents: an Agent over its OpenAIModel."""

from __future__ import annotations

from strands import Agent, tool
from strands.models.openai import OpenAIModel

import mailbox


def agent(task: mailbox.Task) -> str:
    where = {"base_url": mailbox.BASE_URL, "api_key": mailbox.KEY}
    model = OpenAIModel(client_args=where, model_id=mailbox.MODEL, params={})
    tools = [tool(function) for function in mailbox.tools(task)]
    mail = Agent(model=model, tools=list(tools), system_prompt=mailbox.SYSTEM, callback_handler=None)
    return str(mail(task["question"])).strip()


if __name__ == "__main__":
    mailbox.answer(agent, "strands-agents")
