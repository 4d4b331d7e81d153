"""Rollouts: ordinary captured trajectories, whose failures stay and whose interruptions lose nothing that ended."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.operation_records import JobProgress, Rollout, Tuning
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.errors import TooManyFailures
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.tasks import Task
from ratchet.tuner.rollouts.runner import (
    RolloutJob,
    RolloutRunner,
    describe_error,
    final_rollouts,
    pending_jobs,
    plan_rollout,
)
from ratchet.tuner.rollouts.workflow import WorkflowInput, WorkflowOutput
from ratchet.tuner.settings import TunerSettings
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.tuner.conftest import jobs_of

Make = Callable[..., RolloutRunner]


def run(runner: RolloutRunner, jobs: list[RolloutJob], tuning: Tuning, **given: Any) -> list[Rollout]:
    return asyncio.run(runner.run(jobs, tuning.id, **given))


@pytest.mark.slow
def test_every_rollout_is_an_ordinary_captured_trajectory(
    runner: Make, tasks: list[Task], tuning: Tuning, proxy: Proxy, store: Store
) -> None:
    jobs = jobs_of(tasks, attempts=2, candidate="agent@0", purpose="live", scenario={"season": "winter"}, step=3)
    rollouts = run(runner(), jobs, tuning)
    assert [(one.task_id, one.attempt) for one in rollouts] == [(job.task.id, job.attempt) for job in jobs]
    assert {one.state for one in rollouts} == {RolloutState.ENDED}
    proxy.settled()
    for one, job in zip(rollouts, jobs, strict=True):
        trajectory = store.trajectories.read(one.id)
        assert (trajectory.trajectory.task, trajectory.trajectory.purpose) == (job.task.id, "live")
        assert trajectory.row == job.task.row
        assert one.response == json.dumps(trajectory.messages[-1]["content"])
        assert (one.scenario, one.step, one.split) == ({"season": "winter"}, 3, "train")
    assert store.tasks.get(tasks[0].id).task_set == "sums"  # type: ignore[union-attr]


def test_workflows_in_threads_and_programs_are_captured_too(
    runner: Make, tasks: list[Task], tuning: Tuning, proxy: Proxy, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os, sys, urllib.request\n"
        "task = json.load(sys.stdin)\n"
        "body = {'model': os.environ['OPENAI_MODEL'], 'messages': [{'role': 'user', 'content': task['question']}]}\n"
        "headers = {'content-type': 'application/json', 'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "asked = urllib.request.Request(url, json.dumps(body).encode(), headers)\n"
        "print(json.load(urllib.request.urlopen(asked))['choices'][0]['message']['content'])\n"
    )
    threads = run(runner("ask_in_a_thread"), jobs_of(tasks[:2]), tuning)
    assert [one.metrics for one in threads] == [{"turns": 1.0}] * 2
    programs = run(runner(f"{sys.executable} {tmp_path / 'agent.py'}"), jobs_of(tasks[:2]), tuning)
    assert [one.response for one in programs] == [one.response for one in threads]
    proxy.settled()
    assert all(len(store.trajectories.read(one.id).calls) == 1 for one in (*threads, *programs))


def test_a_failed_rollout_stays_with_its_exception_and_its_place(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store
) -> None:
    rollouts = run(runner("crashes"), jobs_of(tasks[:3]), tuning)
    assert {one.state for one in rollouts} == {RolloutState.FAILED}
    assert str(rollouts[0].failure).startswith("ValueError: no tool named search (")
    assert "workflows.py:" in str(rollouts[0].failure)
    assert store.rollouts.of_tuning(tuning.id, responses=True) == rollouts


@pytest.mark.slow
def test_the_place_of_a_failure_is_in_the_agents_own_code(runner: Make, tasks: list[Task], tuning: Tuning) -> None:
    (refused,) = run(runner("ask", proxy_url="http://127.0.0.1:9"), jobs_of(tasks[:1]), tuning)
    assert str(refused.failure).startswith("APIConnectionError: Connection error. (")
    assert "workflows.py:" in str(refused.failure)


@pytest.mark.parametrize("workflow", ["fails_oddly", "fails_oddly_in_a_thread"])
def test_no_way_of_failing_stops_the_others(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store, workflow: str
) -> None:
    run(runner(workflow), jobs_of(tasks[:4]), tuning)
    failures = [str(one.failure) for one in store.rollouts.of_tuning(tuning.id)]
    assert [one.split(":")[0] for one in failures[1:3]] == ["Unreadable", "ValueError"]
    assert failures[0].startswith("WorkflowFailed")
    assert "half ? and \ufffd" in failures[2]


def test_a_workflow_whose_own_task_exits_has_failed_and_ends_nobody(
    runner: Make, tasks: list[Task], tuning: Tuning
) -> None:
    rollouts = run(runner("exits_in_a_child"), jobs_of(tasks[:3]), tuning)
    assert [one.state for one in rollouts] == [RolloutState.ENDED, RolloutState.FAILED, RolloutState.ENDED]
    assert "it called sys.exit(3)" in str(rollouts[1].failure)


def test_a_rollout_that_takes_too_long_has_failed(runner: Make, tasks: list[Task], tuning: Tuning) -> None:
    for workflow in ("hangs", "hangs_in_a_thread"):
        (ended,) = run(runner(workflow, timeout_seconds=0.1), jobs_of(tasks[:1]), tuning)
        assert ended.failure == "TimeoutError: the rollout exceeded 0.1 s (tuner.timeout_seconds)"


def test_the_first_exception_of_a_group_is_reported() -> None:
    group = ExceptionGroup("one or more tool calls raised", [ExceptionGroup("inner", [KeyError("sum")]), OSError("x")])
    assert describe_error(group) == "KeyError: 'sum'"


class Flaky:
    """Fails the first times, then answers; counts how many run at once."""

    name = "flaky"

    def __init__(self, failures: int = 0, seconds: float = 0.0) -> None:
        self._left = failures
        self._seconds = seconds
        self.running = 0
        self.most = 0

    async def run(self, given: WorkflowInput) -> WorkflowOutput:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self._seconds)
        self.running -= 1
        if self._left:
            self._left -= 1
            raise ConnectionError("the tool server is away")
        return WorkflowOutput("done", 1.0)


def test_a_retry_is_a_rollout_of_its_own_and_the_last_one_counts(
    store: Store, tasks: list[Task], tuning: Tuning
) -> None:
    runner = RolloutRunner(store, "http://nowhere", None, Flaky(failures=2), TunerSettings(max_retries=2))
    (ended,) = run(runner, jobs_of(tasks[:1]), tuning)
    assert (ended.state, ended.scenario) == (RolloutState.ENDED, {"retry": 2})
    tries = store.rollouts.of_tuning(tuning.id, responses=True)
    assert [one.state for one in tries] == [RolloutState.FAILED, RolloutState.FAILED, RolloutState.ENDED]
    assert final_rollouts(tries) == [ended]


def test_no_more_run_at_once_than_allowed(store: Store, tasks: list[Task], tuning: Tuning) -> None:
    flaky = Flaky(seconds=0.02)
    runner = RolloutRunner(store, "http://nowhere", None, flaky, TunerSettings(concurrency=3))
    assert len(run(runner, jobs_of(tasks, attempts=10), tuning)) == 80
    assert flaky.most == 3


@pytest.mark.parametrize(("most", "failed"), [(2, 3), (0.25, 3), (0, 1)])
def test_too_many_failures_stop_early_and_quote_the_commonest(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store, most: float, failed: int
) -> None:
    with pytest.raises(
        TooManyFailures, match=f"{failed} of {failed} rollouts failed .*{failed} of them with ValueError"
    ):
        run(runner("crashes", max_failures=most, concurrency=1), jobs_of(tasks), tuning)
    assert sum(one.state is RolloutState.FAILED for one in store.rollouts.of_tuning(tuning.id)) == failed


def test_a_run_whose_first_rollouts_all_fail_stops_and_says_what_they_raised(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store
) -> None:
    failing = runner("crashes_in_two_ways", concurrency=1)
    run(failing, jobs_of(tasks), tuning)  # one round of a few rollouts proves nothing yet
    with pytest.raises(TooManyFailures) as stopped:
        run(failing, [job for step in range(9) for job in jobs_of(tasks, step=step)], tuning)
    assert re.search(r"first 16 rollouts failed, 12 of them with ValueError: no tool named search", str(stopped.value))
    assert "; 4 of them with KeyError" in str(stopped.value)
    assert "set tuner.max_failures " in str(stopped.value)
    assert sum(one.state is RolloutState.FAILED for one in store.rollouts.of_tuning(tuning.id)) == 16


def test_one_rollout_that_returns_lets_a_run_go_on_and_so_does_the_setting(
    store: Store, tasks: list[Task], tuning: Tuning
) -> None:
    for workflow, settings in ((Flaky(failures=15), {}), (Flaky(failures=20), {"max_failures": 40})):
        runner = RolloutRunner(store, "http://nowhere", None, workflow, TunerSettings(concurrency=1, **settings))
        made = run(runner, jobs_of(tasks, attempts=5), tuning)
        assert sum(one.state is RolloutState.FAILED for one in made) in (15, 20)


def test_an_interruption_keeps_what_ended_and_the_rest_can_go_on(
    store: Store, tasks: list[Task], tuning: Tuning
) -> None:
    runner = RolloutRunner(store, "http://nowhere", None, Flaky(seconds=0.05), TunerSettings(concurrency=2))
    jobs = jobs_of(tasks)
    seen: list[Rollout] = []

    async def interrupted() -> None:
        work = asyncio.create_task(runner.run(jobs, tuning.id, on_end=seen.append))
        while len(seen) < 3:
            await asyncio.sleep(0.01)
        work.cancel()
        await work

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    known = store.rollouts.of_tuning(tuning.id)
    assert {one.id for one in seen} <= {one.id for one in known if one.state is RolloutState.ENDED}
    rest = pending_jobs(jobs, known)
    assert 0 < len(rest) <= len(jobs) - 3
    again = RolloutRunner(store, "http://nowhere", None, Flaky(), TunerSettings())
    run(again, rest, tuning)
    assert len(final_rollouts(store.rollouts.of_tuning(tuning.id))) == len(jobs)
    assert pending_jobs(jobs, store.rollouts.of_tuning(tuning.id)) == []


def test_what_an_agent_prints_stays_out_of_the_commands_data(
    runner: Make, tasks: list[Task], tuning: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(runner("prints").run(jobs_of(tasks[:1]), tuning.id))
    seen = capsys.readouterr()
    assert (seen.out, "agent: thinking" in seen.err) == ("", True)


def test_progress_tells_running_means_of_what_has_them(store: Store, tasks: list[Task], tuning: Tuning) -> None:
    seen: list[JobProgress] = []
    runner = RolloutRunner(
        store, "http://nowhere", None, Flaky(failures=2), TunerSettings(concurrency=1), progress=Progress(seen.append)
    )
    run(runner, jobs_of(tasks), tuning)
    last = seen[-1]
    assert (last.done, last.total, last.ended) == (8, 8, True)
    assert (last.means["failed"], last.means["reward"]) == (0.25, 1.0)


def test_an_agent_that_cancels_itself_has_failed_and_stops_nobody(
    store: Store, tasks: list[Task], tuning: Tuning
) -> None:
    class CancelsItself:
        name = "cancels"

        async def run(self, given: WorkflowInput) -> WorkflowOutput:
            raise asyncio.CancelledError

    rollouts = run(RolloutRunner(store, "http://x", None, CancelsItself(), TunerSettings()), jobs_of(tasks), tuning)
    assert len(rollouts) == 8
    assert str(rollouts[0].failure).startswith("CancelledError")


def test_writing_down_does_not_hold_up_the_agents(store: Store, tasks: list[Task], tuning: Tuning) -> None:
    runner = RolloutRunner(store, "http://nowhere", None, Flaky(), TunerSettings(concurrency=32))
    began = time.process_time()
    run(runner, jobs_of(tasks, attempts=50), tuning)
    assert time.process_time() - began < 400 * 0.02


@pytest.mark.parametrize("purpose", ["live", "eval"])
def test_an_agent_that_outlives_its_tuner_calls_into_its_own_abandoned_rollout(
    tasks: list[Task], tuning: Tuning, store: Store, start: Start, purpose: str, tmp_path: Path
) -> None:
    prompt = store.prompts.register("Be brief.")
    early, late = (
        plan_rollout(RolloutJob(tasks[0], attempt, "a", purpose=purpose, prompt_id=prompt.id), tuning.id)
        for attempt in (0, 1)
    )
    store.rollouts.plan([early, late])
    before = start()
    _ask(before, early.id)
    before.settled()
    store.tunings.resume(tuning.id)
    after = start(journal=tmp_path / "later")  # which never heard of it before it was abandoned
    for proxy, name in ((before, early.id), (before, late.id), (after, late.id), (after, early.id)):
        _ask(proxy, name)
        proxy.settled()
    runs = store.trajectories.page()
    assert {run.id.partition("~")[0] for run in runs} == {early.id, late.id}
    assert {run.purpose for run in runs} == {purpose}
    assert {run.task for run in runs} == {tasks[0].id}
    assert store.rollouts.abandoned([run.id for run in runs]) == {run.id for run in runs}


def _ask(proxy: Proxy, rollout: str) -> None:
    body = {"model": "agent", "messages": [{"role": "user", "content": f"late of {rollout}"}]}
    assert proxy.http.post(f"/t/{rollout}/v1/chat/completions", json=body).status_code == 200
