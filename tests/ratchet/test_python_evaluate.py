"""`ratchet.evaluate` and `ratchet.select_model`: with functions of the caller, in a project and at any server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ratchet
from ratchet.store.states import RolloutState
from tests.harness.cli.project import Project
from tests.harness.proxy.servers import eventually
from tests.harness.tuner.judges import exact
from tests.harness.tuner.model_project import TASKS, ModelProject, model_project
from tests.harness.tuner.workflows import ask

pytestmark = pytest.mark.slow


@pytest.fixture
def circle(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelProject]:
    monkeypatch.chdir(project.folder)
    with model_project(project) as made:
        yield made


def test_models_are_compared_with_functions_of_the_caller(circle: ModelProject) -> None:
    judged: list[str] = []

    def judge(task: dict[str, Any], response: str) -> ratchet.Judgement:
        judged.append(response)
        return ratchet.Judgement(float(response == task["answer"]))

    async def workflow(task: dict[str, Any], base_url: str, api_key: str, model: str) -> ratchet.WorkflowOutput:
        return ratchet.WorkflowOutput(await ask(task, base_url=base_url, api_key=api_key, model=model))

    tasks = ratchet.Tasks("sums", split="test")
    found = ratchet.evaluate(workflow, judge, tasks, models=["right-20", "right-95"], attempts=2)
    assert len(judged) == len(found.attempts) == 2 * 2 * TASKS
    assert found.compared("right-95", "right-20").verdict == "better"
    score = found.score("right-95")
    assert (score.tasks, score.failed, score.unjudged) == (TASKS, 0, 0)
    assert score.mean is not None
    assert score.low < score.mean <= score.high
    right = [one for one in found.attempts if one.model == "right-95" and one.score == 1.0]
    assert right
    assert all(one.response == one.task["answer"] for one in right)
    assert "chosen: right-95" in str(found)
    (run,) = circle.store.tunings.page()
    assert (run.id, run.kind, run.state) == (found.run, "eval", "done")
    assert run.config["workflow"].endswith(":test_models_are_compared_with_functions_of_the_caller.<locals>.workflow")


async def test_one_model_at_any_server_is_evaluated_in_a_running_event_loop(circle: ModelProject) -> None:
    given: Any = {"base_url": f"{circle.url}/v1", "limit": 6}
    found = await ratchet.evaluate_async(ask, exact, "sums", models="right-95", **given)
    assert found.run is None
    assert [one.score for one in found.attempts] == [
        float(one.response == one.task["answer"]) for one in found.attempts
    ]
    assert found.score().tasks == 6
    assert str(found).count("unknown") == 2, "no call is recorded here, so tokens and money are not known"
    assert circle.store.tunings.page() == []
    both = await ratchet.evaluate_async(ask, exact, "sums", models=["right-95", "crash"], **given)
    assert both.score("crash").failed == 6
    with pytest.raises(ratchet.TuningError, match=r"no rollout could be scored: InternalServerError"):
        await ratchet.evaluate_async(ask, exact, "sums", models="crash", **given)


async def test_the_proxy_of_the_project_is_recognized_by_its_url(circle: ModelProject) -> None:
    found = await ratchet.evaluate_async(ask, exact, "sums", base_url=f"{circle.proxy_url}/v1", limit=2)
    assert found.scores[0].candidate == "policy@0"
    assert [one.purpose for one in circle.store.rollouts.of_tuning(str(found.run))] == ["eval", "eval"]  # never trained


def test_a_run_that_selects_a_model_has_a_handle(circle: ModelProject) -> None:
    with ratchet.select_model(ask, exact, "sums", models=["right-20", "right-95"]) as run:
        assert run.wait(60).best == "right-95"
    assert run.status == ratchet.RunStatus("done", 2 * TASKS, 0, None)
    assert run.result.spent.rollouts == 2 * TASKS
    assert run.curve() == []
    assert "chosen: right-95" in run.report()
    with pytest.raises(ratchet.InvalidArgument, match="right-95 is no version"):
        run.promote()
    again = ratchet.select_model(resume=run.id)  # as after a restart of the notebook
    assert again.wait().best == "right-95"
    with pytest.raises(ratchet.InvalidArgument, match="that run is a select-model run"):
        ratchet.evaluate(resume=run.id)


def test_a_cancelled_run_is_resumed_by_its_id_and_keeps_what_is_finished(circle: ModelProject) -> None:
    hanging = [True]

    async def workflow(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
        if hanging[0] and task["question"] == "What is 9 + 3?":
            await asyncio.Event().wait()
        return await ask(task, base_url=base_url, api_key=api_key, model=model)

    run = ratchet.select_model(workflow, exact, "sums", models=["right-20", "right-95"], limit=12, concurrency=2)
    try:
        eventually(lambda: run.status.rollouts >= 2, 60)
        with pytest.raises(TimeoutError, match="it goes on"):
            run.wait(0.01)
        with pytest.raises(ratchet.InvalidArgument, match="is running"):
            _ = run.best
    finally:
        run.cancel()
    with pytest.raises(ratchet.RunCancelled, match=f"resume='{run.id}' continues it"):
        run.wait()
    assert run.status.state == "stopped"
    finished = {one.id for one in circle.store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}
    hanging[0] = False
    with pytest.raises(ratchet.InvalidArgument, match="uses the candidates of that run, right-20, right-95: leave"):
        ratchet.select_model(workflow, exact, "sums", models=["right-20", "crash"], resume=run.id)
    again = ratchet.select_model(workflow, exact, "sums", models=["right-20", "right-95"], resume=run.id).wait()
    assert again.id == run.id
    assert again.status.rollouts == 24
    assert finished < {one.id for one in circle.store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"models": ["right-95", "gpt-9"]}, ratchet.TuningError, "gpt-9: unknown to the proxy"),
        ({"models": ["right-95"]}, ratchet.InvalidArgument, "at least two candidates"),
        ({"models": ["right-95", "crash"], "tasks": 3}, ratchet.InvalidArgument, "give a folder, a file, a hub name"),
        ({"models": ["right-95", "crash"], "tasks": "nowhere"}, ratchet.TaskSetError, "nowhere"),
        ({"models": ["right-95", "crash"], "workflow": 3}, ratchet.WorkflowError, "workflow 3 is no function"),
        ({"models": ["right-95", "crash"], "judge": "none:judge"}, ratchet.JudgeError, "none:judge"),
        ({"models": ["right-95", "crash"], "split": "train"}, ratchet.TaskSetError, "no split 'train'"),
        ({"resume": "tun_0"}, ratchet.RatchetError, "tun_0"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_remedy_and_leaves_no_run(
    circle: ModelProject, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"workflow": ask, "judge": exact, "tasks": "sums"} | given
    with pytest.raises(error, match=message):
        ratchet.select_model(**arguments)
    assert circle.store.tunings.page() == []


def test_without_a_project_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_PROXY__PORT", "9")  # where nothing listens
    with pytest.raises(ratchet.InvalidArgument, match=r"does not run in .*: start it with `ratchet up`"):
        ratchet.evaluate(ask, exact, "sums", models="policy")
