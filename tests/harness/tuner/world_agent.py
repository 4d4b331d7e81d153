"""An agent of the small world as users write it: one question, one answer. It knows nothing of prompt tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from tests.harness.tuner import prompt_world


async def agent(task: Mapping[str, Any], base_url: str, model: str) -> str:
    """Answer a task's question under the agent's own system prompt."""
    return await _answer(task, base_url, model, prompt_world.SEED)


async def silent(task: Mapping[str, Any], base_url: str, model: str) -> str:
    """The same without any system prompt."""
    return await _answer(task, base_url, model, None)


async def dated(task: Mapping[str, Any], base_url: str, model: str) -> str:
    """The same with a system prompt that differs from task to task."""
    return await _answer(task, base_url, model, f"{prompt_world.SEED} This is about: {task['question']}")


async def idle(task: Mapping[str, Any]) -> str:
    """Calls no model at all."""
    return "unsure"


async def _answer(task: Mapping[str, Any], base_url: str, model: str, prompt: str | None) -> str:
    system = [] if prompt is None else [{"role": "system", "content": prompt}]
    body = {"model": model, "messages": [*system, {"role": "user", "content": task["question"]}]}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


def judge(response: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Score the answer; the explanation names the right one."""
    return {"score": float(response == task["answer"]), "explanation": f"The word was {task['answer']}."}
