"""LangChain: create_agent over langchain-openai's ChatOpenAI, its messages streamed token by token."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import mailbox


def agent(task: mailbox.Task) -> str:
    model = ChatOpenAI(model=mailbox.MODEL, base_url=mailbox.BASE_URL)
    graph = create_agent(model, list(mailbox.tools(task)), system_prompt=mailbox.SYSTEM)
    request = {"messages": [{"role": "user", "content": task["question"]}]}
    if not task["streamed"]:
        return str(graph.invoke(request)["messages"][-1].content)
    texts: dict[str, str] = {}
    for chunk, _ in graph.stream(request, stream_mode="messages"):
        if chunk.type == "AIMessageChunk":
            texts[chunk.id] = texts.get(chunk.id, "") + chunk.text
    return list(texts.values())[-1]


if __name__ == "__main__":
    mailbox.answer(agent, "langchain")
