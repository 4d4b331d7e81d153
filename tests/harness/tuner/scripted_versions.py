"""A judge with a configured ability per version (how many of every ten questions it solves), and an agent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx

able: dict[int, int] = {}  # version -> questions of ten that it solves
tested: dict[int, int] = {}  # the same of test tasks, where it differs
fails: set[int] = set()  # versions that cannot be judged


def judge(trajectory: Mapping[str, Any]) -> float:
    if trajectory["version"] in fails:
        raise ValueError("nobody answers")
    request = re.search(r"number (\d+)", trajectory["messages"][0]["content"])
    assert request is not None
    version, number = trajectory["version"], int(request[1])
    solved = able.get(version, 0) if number >= 100 else tested.get(version, able.get(version, 0))
    return float(number % 10 < solved)


async def agent(task: Mapping[str, Any], base_url: str, model: str) -> str:
    """One question, one answer, without loading certificates as the SDK's client does."""
    body = {"model": model, "messages": [{"role": "user", "content": task["question"]}]}
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        answer = await client.post(f"{base_url}/chat/completions", json=body)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


async def rewards_itself(task: Mapping[str, Any], base_url: str, model: str) -> dict[str, Any]:
    """The same agent, which also returns a reward."""
    return {"response": await agent(task, base_url, model), "reward": 0.75}
