"""smolagents: ToolCallingAgent, or CodeAgent, over OpenAIModel. Both write their history into texts."""

from __future__ import annotations

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

import mailbox

KIND = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent


def agent(task: mailbox.Task) -> str:
    model = OpenAIModel(model_id=mailbox.MODEL, api_base=mailbox.BASE_URL, api_key=mailbox.KEY)
    tools = [tool(function) for function in mailbox.tools(task)]
    mail = KIND(tools=tools, model=model, stream_outputs=task["streamed"], verbosity_level=0)
    return str(mail.run(task["question"]))


if __name__ == "__main__":
    mailbox.answer(agent, "smolagents")
