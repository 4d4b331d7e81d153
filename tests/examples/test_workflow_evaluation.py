"""Tasks of many calls: the agent itself plays held-out tasks under both versions; what was cut off goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.types import Receive, Send

from ratchet.demo.email_search.tasks import MailTask, read_tasks
from ratchet.store.states import RolloutState, TuningState
from ratchet.store.store import Store, open_store
from ratchet.trainer.errors import TrainerError, TuningError
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.settings.trainer_settings import ReleaseSettings
from ratchet.tuner.selection import WorkflowEvaluator
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.scripts import Messages, Script, calls, says
from tests.harness.proxy.servers import served

TASKS = 12


class ImprovedVersion(ScriptedVllm):
    """Version 1 finds every answer in three calls, the one before it a third of them."""

    def __init__(self, tasks: list[MailTask]) -> None:
        super().__init__()
        self._tasks = {task.question: task for task in tasks}

    async def _answer(self, body: dict[str, Any], script: Script, receive: Receive, send: Send) -> None:
        played = self._play(body["messages"], knows_all=body["model"].endswith("@1"))
        await super()._answer(body, {**script, **played}, receive, send)

    def _play(self, messages: Messages, knows_all: bool) -> Script:
        task = self._tasks[messages[1]["content"]]
        if len(messages) == 2:
            return calls("search_inbox", keywords=[task.person, task.topic])
        if len(messages) == 4:
            return calls("read_email", message_id=task.message_id)
        finds = knows_all or len(task.id) % 3 == 0
        return calls("return_final_answer", answer=task.answer) if finds else says("I could not find it.")


@pytest.fixture
def store(home: Path, store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store of a proxy that serves both versions, and is THE_PROXY."""
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(home))
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(open_store(str(store_file)))
        url = stack.enter_context(served(ImprovedVersion(read_tasks(home, "test"))))
        proxy = stack.enter_context(running(url, made, tmp_path))
        monkeypatch.setenv("THE_PROXY", proxy.url)
        made.rounds.commit(made.rounds.start("agent", 0).id, version=1, checkpoint="/c/1", groups=[], metrics={})
        yield made


@pytest.fixture
def evaluator(store: Store, home: Path) -> Iterator[Callable[..., WorkflowEvaluator]]:
    made: list[WorkflowEvaluator] = []

    def make(**changes: Any) -> WorkflowEvaluator:
        values = {
            "workflow": "ratchet.demo.email_search.agent:workflow",
            "tasks": str(home),
            "proxy_url": os.environ["THE_PROXY"],
            "evaluation_prompts": TASKS,
            "evaluation_samples": 2,
        }
        judges = [
            FunctionJudge("ratchet.demo.email_search.tasks:judge"),
            FunctionJudge("examples.reward_hacking.second:judge"),
        ]
        made.append(WorkflowEvaluator(store, "agent", ReleaseSettings(**(values | changes)), *judges))
        return made[-1]

    yield make
    for one in made:
        one.close()


def evaluate(store: Store, evaluator: WorkflowEvaluator, check: Callable[[], None] = lambda: None) -> Any:
    return evaluator.evaluate(store.policies.get("agent", 1), store.policies.get("agent", 0), check)


@pytest.mark.slow
async def test_a_candidate_is_compared_on_tasks_of_several_calls(
    store: Store, evaluator: Callable[..., WorkflowEvaluator]
) -> None:
    found = await asyncio.to_thread(evaluate, store, evaluator())
    assert (found.first.prompts, found.first.what, found.first.candidate) == (TASKS, "tasks", 1.0)
    assert found.first.low > 0
    assert found.first.live < 1.0
    assert (found.second.prompts, found.second.what, found.second.candidate) == (TASKS, "tasks", 1.0)
    assert found.second.difference > 0
    run = store.tunings.get(found.run)
    assert (run.state, run.config["release"], run.config["candidates"]) == (
        TuningState.DONE,
        True,
        ["agent@0", "agent@1"],
    )
    rollouts = store.rollouts.of_tuning(run.id)
    assert len(rollouts) == 2 * 2 * TASKS
    assert {one.purpose for one in rollouts} == {"eval"}, "never trained"
    read = store.trajectories.read(rollouts[0].id)
    assert len(read.calls) == 3


@pytest.mark.slow
async def test_an_evaluation_that_was_cut_off_goes_on_where_it_was(
    store: Store, evaluator: Callable[..., WorkflowEvaluator]
) -> None:
    started = 0

    def kill() -> None:
        nonlocal started
        started += 1
        if started > 20:
            raise TrainerError("the trainer ends")

    with pytest.raises(TrainerError):
        await asyncio.to_thread(evaluate, store, evaluator(evaluation_concurrency=2), kill)
    (run,) = store.tunings.page("eval")
    done = {one.id for one in store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}
    assert run.state is TuningState.RUNNING
    assert 15 <= len(done) <= 20
    found = await asyncio.to_thread(evaluate, store, evaluator(evaluation_concurrency=2))
    assert found.run == run.id
    assert done <= {one.id for one in store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}
    ended = [one for one in store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED]
    assert len(ended) == 2 * 2 * TASKS
    assert found.first.candidate == 1.0


async def test_an_agent_that_always_fails_measures_nothing(
    store: Store, evaluator: Callable[..., WorkflowEvaluator]
) -> None:
    broken = evaluator(workflow="tests.harness.tuner.workflows:crashes")
    with pytest.raises(TuningError, match=r"all .*rollouts failed"):
        await asyncio.to_thread(evaluate, store, broken)


def test_a_workflow_without_tasks_is_refused() -> None:
    with pytest.raises(ValidationError, match="set workflow and tasks together"):
        ReleaseSettings(workflow="a:b")
