"""LlamaIndex: a FunctionAgent over OpenAILike."""

from __future__ import annotations

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

import mailbox


async def agent(task: mailbox.Task) -> str:
    model = OpenAILike(
        model=mailbox.MODEL,
        api_base=mailbox.BASE_URL,
        api_key=mailbox.KEY,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    tools = [FunctionTool.from_defaults(tool) for tool in mailbox.tools(task)]
    mail = FunctionAgent(tools=tools, llm=model, system_prompt=mailbox.SYSTEM, streaming=task["streamed"])
    return str(await mail.run(task["question"]))


if __name__ == "__main__":
    mailbox.answer(agent, "llama-index-core")
