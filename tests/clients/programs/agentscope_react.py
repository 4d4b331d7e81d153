"""AgentScope: its ReAct agent over OpenAIChatModel, with a base URL in the credential."""

from __future__ import annotations

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

import mailbox

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="reading is harmless")


async def agent(task: mailbox.Task) -> str:
    credential = OpenAICredential(api_key=mailbox.KEY, base_url=mailbox.BASE_URL)
    model = OpenAIChatModel(credential=credential, model=mailbox.MODEL, stream=task["streamed"])
    tools = [FunctionTool(tool, permission=ALLOWED) for tool in mailbox.tools(task)]
    mail = Agent(name="mail", system_prompt=mailbox.SYSTEM, model=model, toolkit=Toolkit(tools=list(tools)))
    reply = await mail.reply(UserMsg(name="user", content=task["question"]))
    return str(reply.get_text_content())


if __name__ == "__main__":
    mailbox.answer(agent, "agentscope")
