"""`ratchet.tune_prompt`: with functions of the caller, in an event loop, promoted and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

import ratchet
from ratchet.store.states import PolicyState
from tests.harness.cli.project import Project
from tests.harness.tuner import prompt_world, world_agent
from tests.harness.tuner.prompt_project import prompt_project

pytestmark = pytest.mark.slow


async def test_a_better_prompt_is_found_for_an_agent_of_the_caller_and_promoted(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    answered: list[str] = []
    hangs = [True]

    async def agent(task: Mapping[str, Any], base_url: str, model: str) -> str:
        if hangs[0] and len(answered) >= 4:
            await asyncio.Event().wait()
        answered.append(await world_agent.agent(task, base_url, model))
        return answered[-1]

    def judge(task: dict[str, Any], response: str) -> Any:
        return world_agent.judge(response, task)

    with prompt_project(project) as made:
        named: dict[str, Any] = {"reflection_url": made.reflection.base_url, "reflection_model": "scripted-reflection"}
        with pytest.raises(ratchet.InvalidArgument, match="needs --reflection-model"):
            await ratchet.tune_prompt_async(agent, judge, "world", reflection_url=made.reflection.base_url)
        with pytest.raises(ratchet.RatchetError, match="no reflection model is set"):
            await ratchet.tune_prompt_async(agent, judge, "world")
        assert made.store.tunings.page() == []
        run = await ratchet.tune_prompt_async(agent, judge, "world", seed=1, max_rollouts=200, **named)
        while run.status.rollouts < 4:
            await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(ratchet.RunCancelled):
            await run
        assert run.status.state == "stopped"
        hangs[0] = False
        with pytest.raises(ratchet.InvalidArgument, match="use the same judge"):
            await ratchet.tune_prompt_async(agent, world_agent.judge, resume=run.id)
        again = await (await ratchet.tune_prompt_async(agent, judge, resume=run.id))
        assert again.best is not None
        assert all(f"a {thing} is a {word}" in again.best for thing, word in prompt_world.WORDS.items())
        assert "better" in again.report()
        assert again.promote() == "policy@1"
        assert made.store.policies.get("policy", 1).state is PolicyState.CANDIDATE
        assert again.rollback(0) == "policy@0"
