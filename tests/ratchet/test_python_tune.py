"""`ratchet.tune`: services for one run, a judge that only this process has, and a cancelled start."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

import ratchet
from ratchet.store.store import open_store
from tests.harness.cli.project import ROOT, Project, wait_for
from tests.harness.tuner.scripted_versions import agent

pytestmark = pytest.mark.slow


@pytest.fixture
def tuned(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project that can be tuned, in the current folder."""
    project.make_trainable()
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
    assert {one.judge.partition(":")[0] for one in verdicts.values()} <= {"caller"}  # what the trainer used
    assert {one.failure for one in verdicts.values()} <= {None}
    assert {one["id"] for one in seen} >= set(verdicts)


def test_families_with_an_agent_and_a_judge_each_train_in_one_run(tuned: Project) -> None:
    seen: dict[str, set[str]] = {"numbers": set(), "words": set()}
    shutil.copytree(tuned.folder / "tasks", tuned.folder / "words")
    for file in (tuned.folder / "words").iterdir():
        file.write_text(file.read_text().replace("number", "word"))

    async def count(task: Mapping[str, Any], base_url: str, model: str) -> str:
        return await agent(task, base_url, model)

    async def spell(task: Mapping[str, Any], base_url: str, model: str) -> ratchet.WorkflowOutput:
        return ratchet.WorkflowOutput(await agent(task, base_url, model), metrics={"letters": 3.0})

    def judge_of(name: str) -> Any:
        def judge(task: dict[str, Any], response: str) -> float:
            seen[name].add(task["question"].split()[0])
            return float(len(response) % 2)

        return judge

    families = {
        "numbers": ratchet.Family("tasks", count, judge_of("numbers")),
        "words": ratchet.Family(ratchet.Tasks("words"), spell, judge_of("words"), weight=2.0),
    }
    with pytest.raises(ratchet.InvalidArgument, match="leave judge= out"):
        ratchet.tune(families=families, judge=judge_of("words"))
    with pytest.raises(ratchet.InvalidArgument, match=r"give a mapping of names to `ratchet\.Family"):
        ratchet.tune(families={"words": "words"})  # type: ignore[dict-item]
    sizes: dict[str, Any] = {"rounds": 1, "tasks_per_round": 6, "attempts": 2, "eval_tasks": 2, "validation_tasks": 1}
    run = ratchet.tune(families=families, seed=3, **sizes).wait(300)
    assert seen == {"numbers": {"number"}, "words": {"word"}}
    assert set(run.curve()[-1]["families"]) == {"numbers", "words"}
    store = open_store(str(tuned.state / "store.db"))
    try:
        made = store.rollouts.of_tuning(run.id)
    finally:
        store.close()
    by_family = {name: [one for one in made if one.task_id.startswith(f"{name}/")] for name in families}
    assert all(any(one.purpose == "live" for one in some) for some in by_family.values())
    assert {bool(one.metrics) for one in by_family["words"]} == {True}
    assert {bool(one.metrics) for one in by_family["numbers"]} == {False}


def test_settings_of_a_call_are_checked_like_those_of_the_file(tuned: Project) -> None:
    judge = "tests.harness.tuner.scripted_versions:judge"
    with pytest.raises(
        ratchet.RatchetError, match=r"settings=: unknown key vllm\.max_model_length; the nearest known key"
    ):
        ratchet.tune(agent, judge, "tasks", settings={"vllm": {"max_model_length": 4096}})
    with pytest.raises(ratchet.RatchetError, match=r"trainer\.num_generations"):
        ratchet.tune(agent, judge, "tasks", settings={"trainer": {"num_generations": "many"}})
    with pytest.raises(ratchet.InvalidArgument, match="settings is 3: give a mapping"):
        ratchet.tune(agent, judge, "tasks", settings=3)  # type: ignore[arg-type]
    assert not tuned.state.exists()


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


def returns_nothing(response: str) -> None:
    len(response)


CELL = """
import asyncio, pathlib
import ratchet

async def workflow(task, base_url, model):
    pathlib.Path("began").touch()
    await asyncio.sleep(600)

run = ratchet.tune(workflow, lambda response: float(len(response)), "tasks", attempts=2)
print(run.id, flush=True)
run.wait()
"""


def test_ctrl_c_in_a_cell_that_waits_stops_the_services_and_the_run_can_be_resumed(tuned: Project) -> None:
    (tuned.folder / "cell.py").write_text(CELL)
    with subprocess.Popen(
        [sys.executable, "cell.py"], cwd=tuned.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as cell:
        try:
            wait_for("a rollout runs", lambda: (tuned.folder / "began").exists() or cell.poll() is not None, 300)
            assert cell.stdout is not None
            run = cell.stdout.readline().strip()
            cell.send_signal(signal.SIGINT)
            _, errors = cell.communicate(timeout=120)
        finally:
            cell.kill()
    assert "KeyboardInterrupt" in errors
    assert "Task was destroyed" not in errors
    assert f"`ratchet.tune(resume='{run}', ...)` resumes it" in errors
    assert list((tuned.state / "run").glob("*.pid")) == []
    store = open_store(str(tuned.state / "store.db"))
    try:
        assert store.tunings.get(run).state == "stopped"
    finally:
        store.close()


def test_what_is_missing_is_named_before_anything_is_started(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    judge = "tests.harness.tuner.scripted_versions:judge"
    with pytest.raises(ratchet.InvalidArgument, match="no judge is set"):
        ratchet.tune(agent, None, "tasks")
    with pytest.raises(ratchet.TaskSetError, match="tasks"):
        ratchet.tune(agent, "tests.harness.tuner.scripted_versions:judge", "./tasks")
    with pytest.raises(ratchet.InvalidArgument, match="warm_start"):
        ratchet.tune(agent, "tests.harness.tuner.scripted_versions:judge", "./tasks", warm_start=["policy", "policy"])
    rows = [{"question": "one?"}]
    with pytest.raises(ratchet.WorkflowError, match="is no function"):
        ratchet.gather(3, rows, judge)  # type: ignore[arg-type]
    with pytest.raises(ratchet.JudgeError, match="returns nothing: end it with a score"):
        ratchet.gather(agent, rows, returns_nothing)
    with pytest.raises(ratchet.InvalidArgument, match="judge is 3: give a function"):
        ratchet.gather(agent, rows, 3)  # type: ignore[arg-type]
    (project.folder / "only.jsonl").write_text('{"question": "one?"}\n{"question": "two?"}')
    with pytest.raises(ratchet.TaskSetError, match=r"no split 'test'; it has train; .*in Python test_size=0\.2"):
        ratchet.tune(agent, judge, "./only.jsonl")
    (project.folder / "ratchet.yaml").write_text("project: other")
    with pytest.raises(ratchet.InvalidArgument, match="base_model="):
        ratchet.tune(agent, "tests.harness.tuner.scripted_versions:judge", "./tasks")
    assert not project.state.exists()
