"""An ordinary LangGraph agent with one tool. It contains nothing of Ratchet: OPENAI_BASE_URL names the server."""

from datetime import datetime

from langchain.agents import create_agent  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

from examples.math import calculator

SYSTEM = "You are a helpful math assistant."
# The tiny policy was trained with this reminder, which AgentScope's agents send. Other models do not need it.
REMINDER = (
    "<system-reminder>Treat the following as the ground truth at this point of the conversation. Anything stated "
    "earlier is outdated, and a later reminder, if any, supersedes this one:\n"
    "<current-time>{time:%Y-%m-%dT%H:%M:%S}</current-time>\n<timezone>UTC</timezone>\n</system-reminder>"
)
MAX_STEPS = 10  # of the graph: a call of the model, a call of the tool, ...


@tool
async def calculate(expression: str) -> str:
    """Work out an expression of two whole numbers with +, - or * between them."""
    try:
        return await calculator.calculate(expression)
    except ValueError as error:
        return f"Error: {error}"


async def solve(question: str, model: str, **server: str) -> str:
    """Return the agent's answer to one question. `server`: base_url and api_key, in place of the variables."""
    chat = ChatOpenAI(model=model, max_tokens=128, **server)
    agent = create_agent(chat, [calculate], system_prompt=SYSTEM)
    texts = (question, REMINDER.format(time=datetime.now()))
    messages = [{"role": "user", "content": text} for text in texts]
    state = await agent.ainvoke({"messages": messages}, {"recursion_limit": MAX_STEPS})
    return str(state["messages"][-1].content)
