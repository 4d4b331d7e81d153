"""The planner and its worker as a workflow: one problem, solved once. It scores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.planner.agent import Team
from ratchet.demo.traffic import connection


async def workflow(task: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> str:
    """Returns the planner's last word. Raises what the server's errors raise."""
    async with connection(base_url, api_key) as client:
        return await Team(client, model).solve(task["question"])
