"""The math agent, in AgentScope: its ReAct agent with a calculator. Nothing of it knows Ratchet.

Any AgentScope agent is pointed at a proxy like this: by the base URL of its credential, and by nothing else.
"""

from __future__ import annotations

from agentscope.agent import Agent, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from examples.math.calculator import calculate
from examples.math.prompt import SYSTEM

TURNS = 4
MAX_TOKENS = 128
ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="calculating is harmless")


def math_agent(base_url: str, api_key: str, model: str) -> Agent:
    """A new agent, with no memory of any other question."""
    return Agent(
        name="math",
        system_prompt=SYSTEM,
        model=OpenAIChatModel(
            credential=OpenAICredential(api_key=api_key, base_url=base_url),
            model=model,
            parameters=OpenAIChatModel.Parameters(max_tokens=MAX_TOKENS),
        ),
        toolkit=Toolkit(tools=[FunctionTool(calculate, permission=ALLOWED)]),
        react_config=ReActConfig(max_iters=TURNS),
    )


async def solve(agent: Agent, question: str) -> str:
    """The agent's answer to one question."""
    reply = await agent.reply(UserMsg(name="user", content=question))
    return str(reply.get_text_content() or "")
