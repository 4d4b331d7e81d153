"""The math agent as a workflow: one problem, solved once. It scores nothing.

As a function (`examples.math.workflow:workflow`) it needs AgentScope beside Ratchet; as a program (`python -m
examples.math.workflow`, the task on stdin) it runs in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from examples.math.agent import math_agent, solve


async def workflow(task: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> str:
    """Returns what the agent answered. Raises what the server's errors raise."""
    agent = math_agent(base_url, api_key, model)
    try:
        return await solve(agent, str(task["question"]))
    finally:
        await agent.model.client.close()  # AgentScope leaves its connections open


if __name__ == "__main__":
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    print(asyncio.run(workflow(json.load(sys.stdin), **where, model=os.environ["OPENAI_MODEL"])))
