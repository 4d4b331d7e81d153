"""The agent as a workflow: one question, answered once. It scores nothing.

As a function (`examples.langgraph_math.workflow:workflow`) it needs LangGraph beside Ratchet; as a program (`python -m
examples.langgraph_math.workflow`, the task as JSON on stdin) it runs in an environment without Ratchet.
"""

import asyncio
import json
import os
import sys
from typing import Any

from examples.langgraph_math.agent import solve


async def workflow(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Return the agent's answer to one task."""
    return await solve(task["question"], model, base_url=base_url, api_key=api_key)


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin)["question"], os.environ["OPENAI_MODEL"])))
