"""LangGraph: the prebuilt ReAct agent over langchain-openai's ChatOpenAI."""

from __future__ import annotations

import warnings

from langchain_openai import ChatOpenAI

import mailbox

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent


def agent(task: mailbox.Task) -> str:
    model = ChatOpenAI(model=mailbox.MODEL, base_url=mailbox.BASE_URL, streaming=task["streamed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = create_react_agent(model, list(mailbox.tools(task)), prompt=mailbox.SYSTEM)
    request = {"messages": [{"role": "user", "content": task["question"]}]}
    if not task["streamed"]:
        return str(graph.invoke(request)["messages"][-1].content)
    last = None
    for state in graph.stream(request, stream_mode="values"):
        last = state["messages"][-1].content
    return str(last)


if __name__ == "__main__":
    mailbox.answer(agent, "langgraph")
