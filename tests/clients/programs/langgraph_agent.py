"""LangGraph: the prebuilt ReAct agent over langchain-openai's ChatOpenAI."""

from __future__ import annotations

import warnings

from langchain_openai import ChatOpenAI

import mailbox

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent


def agent(asked: mailbox.Asked) -> str:
    model = ChatOpenAI(model=mailbox.MODEL, base_url=mailbox.BASE_URL, streaming=asked["streamed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = create_react_agent(model, list(mailbox.tools(asked)), prompt=mailbox.SYSTEM)
    given = {"messages": [{"role": "user", "content": asked["question"]}]}
    if not asked["streamed"]:
        return str(graph.invoke(given)["messages"][-1].content)
    last = None
    for state in graph.stream(given, stream_mode="values"):
        last = state["messages"][-1].content
    return str(last)


if __name__ == "__main__":
    mailbox.answer(agent, "langgraph")
