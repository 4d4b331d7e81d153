"""`ratchet.tune`: services for one run, a judge that only this process has, and a cancelled start."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

import ratchet
from ratchet.store.store import open_store
from tests.harness.cli.project import ROOT, Project
from tests.harness.trainer.tiny import build_tiny_model
from tests.harness.tuner.scripted_versions import agent

pytestmark = pytest.mark.slow


@pytest.fixture
def tuned(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project that can be tuned, in the current folder."""
    model = build_tiny_model(project.folder / "tiny", hidden=32, layers=1)
    engine = {"command": [sys.executable, "-m", "tests.harness.cli.scripted_engine"]}
    project.write(base_model=str(model), vllm=project.content["vllm"] | engine, learner={"threads": 1})
    (project.folder / "tasks").mkdir()
    for split, start in (("train", 0), ("test", 10)):
        rows = [json.dumps({"question": f"number {start + number}? #say=so"}) for number in range(6)]
        (project.folder / "tasks" / f"{split}.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return project


def test_services_are_started_for_a_run_whose_judge_is_a_closure_and_are_stopped_at_its_end(tuned: Project) -> None:
    seen: list[dict[str, Any]] = []

    def judge(trajectory: dict[str, Any], task: dict[str, Any], response: str) -> ratchet.Judgement:
        seen.append(trajectory)
        return ratchet.Judgement(float("number" in task["question"] and len(response) % 2), {"length": len(response)})

    async def workflow(task: Mapping[str, Any], base_url: str, model: str) -> str:
        return await agent(task, base_url, model)

    sizes: dict[str, Any] = {"rounds": 1, "tasks_per_round": 2, "attempts": 2, "eval_tasks": 4, "validation_tasks": 1}
    with ratchet.tune(workflow, judge, "tasks", seed=3, **sizes) as run:
        run.wait(300)
    assert list((tuned.state / "run").glob("*.pid")) == []
    assert [one["round"] for one in run.curve()] == [0, 1]
    assert run.status.rollouts == 4 + 1 + 2 * 2  # test, validation, training
    assert "policy@0" in run.report()
    store = open_store(str(tuned.state / "store.db"))
    try:
        trained = [one for one in store.rollouts.of_tuning(run.id) if one.purpose == "live"]
        verdicts = store.groups.verdicts([one.id for one in trained])
    finally:
        store.close()
    assert {one.judge.partition(":")[0] for one in verdicts.values()} <= {"http"}  # what the trainer used
    assert {one.failure for one in verdicts.values()} <= {None}
    assert {one["id"] for one in seen} >= set(verdicts)


async def test_a_start_that_is_cancelled_leaves_no_process(tuned: Project) -> None:
    stuck = {"command": [sys.executable, "-c", "import time; time.sleep(600)"]}
    tuned.write(vllm=tuned.content["vllm"] | stuck)
    starting = asyncio.create_task(
        ratchet.tune_async(agent, "tests.harness.tuner.scripted_versions:judge", "tasks", attempts=2)
    )
    while not (tuned.state / "run" / "vllm.pid").exists():
        assert not starting.done(), starting.exception()
        await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with asyncio.timeout(120):
        while list((tuned.state / "run").glob("*.pid")):
            await asyncio.sleep(0.05)


def test_what_is_missing_is_named_before_anything_is_started(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    with pytest.raises(ratchet.InvalidArgument, match="no judge is set"):
        ratchet.tune(agent, None, "tasks")
    with pytest.raises(ratchet.TaskSetError, match="tasks"):
        ratchet.tune(agent, "tests.harness.tuner.scripted_versions:judge", "./tasks")
    with pytest.raises(ratchet.InvalidArgument, match="warm_start"):
        ratchet.tune(agent, "tests.harness.tuner.scripted_versions:judge", "./tasks", warm_start=["policy", "policy"])
    (project.folder / "ratchet.yaml").write_text("project: other")
    with pytest.raises(ratchet.InvalidArgument, match="base_model="):
        ratchet.tune(agent, "tests.harness.tuner.scripted_versions:judge", "./tasks")
    assert not project.state.exists()
