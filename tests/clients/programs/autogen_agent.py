"""AutoGen: an AssistantAgent over OpenAIChatCompletionClient."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

import mailbox

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=False)


async def agent(task: mailbox.Task) -> str:
    model = OpenAIChatCompletionClient(model=mailbox.MODEL, base_url=mailbox.BASE_URL, model_info=INFO)
    mail = AssistantAgent(
        "mail",
        model_client=model,
        tools=list(mailbox.tools(task)),
        system_message=mailbox.SYSTEM,
        model_client_stream=task["streamed"],
        max_tool_iterations=8,
    )
    return str((await mail.run(task=task["question"])).messages[-1].content)


if __name__ == "__main__":
    mailbox.answer(agent, "autogen-agentchat")
