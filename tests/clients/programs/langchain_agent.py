"""LangChain: create_agent over langchain-openai's ChatOpenAI, its messages streamed token by token."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import mailbox


def agent(asked: mailbox.Asked) -> str:
    model = ChatOpenAI(model=mailbox.MODEL, base_url=mailbox.BASE_URL)
    graph = create_agent(model, list(mailbox.tools(asked)), system_prompt=mailbox.SYSTEM)
    given = {"messages": [{"role": "user", "content": asked["question"]}]}
    if not asked["streamed"]:
        return str(graph.invoke(given)["messages"][-1].content)
    said: dict[str, str] = {}
    for chunk, _ in graph.stream(given, stream_mode="messages"):
        if chunk.type == "AIMessageChunk":
            said[chunk.id] = said.get(chunk.id, "") + chunk.text
    return list(said.values())[-1]


if __name__ == "__main__":
    mailbox.answer(agent, "langchain")
