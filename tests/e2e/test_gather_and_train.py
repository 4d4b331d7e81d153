"""`ratchet.gather` and `ratchet.train` on the real vLLM: what a loop gathers becomes the next version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

import ratchet
from ratchet.demo.email_search.agent import opening
from ratchet.store.states import PolicyState
from ratchet.store.store import open_store
from tests.harness.cli.project import ROOT, Project

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"


async def workflow(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> dict[str, str]:
    """One call; returns what was said, and the version that said it."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: Any = opening(task["question"], 6)
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=24, temperature=1.0, logprobs=True
        )
    return {"said": str(answer.choices[0].message), "version": answer.model}


@pytest.mark.e2e
@pytest.mark.slow
def test_a_loop_of_gather_and_train_samples_each_step_from_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path)
    vllm = {"port": project.content["vllm"]["port"], "max_model_len": 1024, "dtype": "float32"}
    learner = {"lora_r": 8, "lora_alpha": 16, "learning_rate": 2e-3, "threads": 1}
    project.write(base_model=str(POLICY), vllm=vllm, model="mail", learner=learner)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the services
    scenarios = [{"question": f"Where is the picnic of team {number}?"} for number in range(2)]

    def judge(response: Mapping[str, str]) -> float:
        return sum(map(ord, response["said"])) % 997 / 997  # differs between any two answers

    try:
        versions, trained = [], []
        with ratchet.services():
            for step in range(2):
                groups = ratchet.gather(workflow, scenarios, judge, attempts=4, step=step)
                assert {one.failure for group in groups for one in group.trajectories} == {None}
                versions.append({one.response["version"] for group in groups for one in group.trajectories})
                trained.append(ratchet.train(groups, timeout=240))
        assert list((project.state / "run").glob("*.pid")) == []
    finally:
        project.stop()
    with open_store(str(project.state / "store.db")) as store:
        states = {one.version: one.state for one in store.policies.all("mail")}
    assert [one.name for one in trained] == ["mail@1", "mail@2"]
    assert all(one.metrics["tokens_trained"] > 50 for one in trained)
    assert all(one.metrics["logprob_abs_diff_mean"] < 0.2 for one in trained), "vLLM and the trainer differ"
    if trained[0].state == "live":  # else its step was too small to tell from rounding
        assert versions == [{"mail@0"}, {"mail@1"}]
        assert states[1] in (PolicyState.LIVE, PolicyState.RETIRED)
