"""Scores: one judge that sees row and response, failures that stay failures, tokens that are counted."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from ratchet.store.operation_records import ProxyInstance, Rollout, Tuning
from ratchet.store.records import Trajectory, Transcript
from ratchet.store.states import RolloutState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.judges.judgement import DraftVerdict, GroupJudgement, Judge
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from ratchet.trainer.tasks import Task
from ratchet.tuner.rollouts.diagnosis import judge_problems
from ratchet.tuner.rollouts.runner import RolloutRunner
from ratchet.tuner.rollouts.scoring import NO_CALL, NO_JUDGE, RolloutScorer
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.records import TOOLS
from tests.tuner.conftest import ALIAS, jobs_of

Make = Callable[..., RolloutRunner]


def by_row(task: dict[str, Any], response: str) -> float:
    """A judge that knows the row and the response alone, as the seed's."""
    return float(task["answer"] in response)


def sees(task: Any, response: Any, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """A judge that fails on what it did not expect."""
    assert isinstance(task, dict)
    assert trajectory["messages"][-1]["content"] != response
    return {"score": 1.0}


def judge_of(spec: Any) -> Judge:
    return make_judge(read_spec(spec), {})


def rollouts_of(runner: RolloutRunner, tasks: list[Task], tuning: Tuning, attempts: int = 1) -> list[Rollout]:
    return asyncio.run(runner.run(jobs_of(tasks, attempts), tuning.id))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}:by_row",
        {"kind": "answer", "column": "answer", "match": "contains"},
        {"kind": "answer", "column": "answer", "match": "numeric"},
    ],
)
def test_a_judge_gets_the_row_and_the_response(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store, spec: Any
) -> None:
    scored = RolloutScorer(store, judge_of(spec)).score(rollouts_of(runner(), tasks, tuning, attempts=2))
    assert [one.score for one in scored] == [0, 0, 1, 1] * 4
    assert store.rollouts.of_tuning(tuning.id, responses=True) == scored
    assert all(one.prompt_tokens > 0 and one.completion_tokens > 0 for one in scored)


@pytest.mark.slow
def test_without_a_judge_the_workflows_own_reward_counts(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store
) -> None:
    scored = RolloutScorer(store, None).score(rollouts_of(runner("rewards_itself"), tasks, tuning))
    assert [one.score for one in scored] == [0, 1] * 4
    assert {one.judge for one in scored} == {"workflow"}
    judged = RolloutScorer(store, judge_of({"kind": "workflow"})).score(scored)
    assert [one.score for one in judged] == [0, 1] * 4
    unjudged = RolloutScorer(store, None).score(rollouts_of(runner("ask"), tasks[:1], tuning))
    assert [(one.score, one.judge_failure) for one in unjudged] == [(None, NO_JUDGE)]


@pytest.mark.slow
def test_a_judge_failure_is_kept_and_is_no_number(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store
) -> None:
    scored = RolloutScorer(store, judge_of(f"{__name__}:sees")).score(rollouts_of(runner(), tasks[:2], tuning))
    assert [one.score for one in scored] == [None, None]
    assert all(str(one.judge_failure).startswith("AssertionError") for one in scored)


@pytest.mark.slow
def test_a_failed_rollout_is_not_judged_and_keeps_its_failure(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store
) -> None:
    (one,) = RolloutScorer(store, judge_of(f"{__name__}:by_row")).score(
        rollouts_of(runner("crashes"), tasks[:1], tuning)
    )
    assert (one.state, one.score, one.judge) == (RolloutState.FAILED, None, None)


@pytest.mark.slow
def test_a_workflow_without_calls_is_reported(runner: Make, tasks: list[Task], tuning: Tuning, store: Store) -> None:
    (one,) = RolloutScorer(store, judge_of(f"{__name__}:by_row")).score(
        rollouts_of(runner("only_the_task"), tasks[:1], tuning)
    )
    assert one.judge_failure == NO_CALL


@pytest.mark.slow
def test_tokens_of_failed_rollouts_count_too(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store, proxy: Proxy
) -> None:
    (one,) = RolloutScorer(store, None).score(rollouts_of(runner("asks_then_crashes"), tasks[:1], tuning))
    assert one.state is RolloutState.FAILED
    assert one.prompt_tokens > 0


@pytest.mark.slow
def test_what_a_proxy_has_not_shipped_is_unjudged_and_never_judged_on_a_part(
    runner: Make, tasks: list[Task], tuning: Tuning, store: Store, proxy: Proxy
) -> None:
    made = rollouts_of(runner(), tasks[:2], tuning)
    proxy.settled()
    behind = ProxyInstance(
        id="d", url="u", live_versions={ALIAS: 0}, pinned_trajectories={}, shipped_until=1.0, heartbeat_at=time.time()
    )
    store.proxy_instances.heartbeat(behind)
    judge = judge_of(f"{__name__}:by_row")
    scored = RolloutScorer(store, judge, max_wait_seconds=0.3).score(made)
    assert [one.score for one in scored] == [None, None]
    assert all("not all in the store after 0.3 s" in str(one.judge_failure) for one in scored)
    store.proxy_instances.remove("d")
    assert [one.score for one in RolloutScorer(store, judge).score(scored)] == [0, 1]


class Slow:
    """A judge of one group at a time that counts the transcripts in memory."""

    concurrency = 1
    name, version = "slow", "1"

    def __init__(self) -> None:
        self.most = 0

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        time.sleep(0.05)
        self.most = max(self.most, sum(type(one) is Transcript for one in gc.get_objects()))
        return GroupJudgement(tuple(DraftVerdict.of(1.0, "").verdict(
            one, group_id, judge=self.name, version=self.version, cost=None, latency=0.0, judged_at=1.0
        ) for one in members))  # fmt: skip

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.slow
def test_few_transcripts_are_in_memory_at_a_time(runner: Make, tasks: list[Task], tuning: Tuning, store: Store) -> None:
    made = rollouts_of(runner(), tasks, tuning)
    gc.collect()
    before, slow = sum(type(one) is Transcript for one in gc.get_objects()), Slow()
    scored = RolloutScorer(store, slow).score(made)
    assert [one.score for one in scored] == [1.0] * 8
    assert slow.most - before < 6


_TOOLS = (
    *TOOLS,
    {"type": "function", "function": {"name": "submit", "parameters": {"properties": {"answer": {"type": "string"}}}}},
)


def by_tool(trajectory: dict[str, Any], task: dict[str, Any]) -> float:
    """Score what the tool `submit` was given, as agents that answer by a tool are scored."""
    calls = [call for message in trajectory["messages"] for call in message.get("tool_calls") or ()]
    given = [json.loads(one["function"]["arguments"]) for one in calls if one["function"]["name"] == "submit"]
    return float(given[:1] == [{"answer": task["answer"]}])


def blind(trajectory: dict[str, Any]) -> float:
    """Like everything."""
    return float(len(trajectory["messages"]) >= 0)


def transcript() -> Transcript:
    run = Trajectory(
        id="t", alias="agent", version=0, state=TrajectoryState.SEALED, task="sums/1", root_node="r", tools_hash="",
        key_id=None, opened_at=1.0, last_active_at=2.0,
    )  # fmt: skip
    messages = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"})
    return Transcript(
        trajectory=run, calls=(), messages=messages, tools=_TOOLS, row={"question": "2 + 2?", "answer": "4"}
    )


def test_a_judge_of_answers_that_a_tool_gives_is_not_called_blind() -> None:
    assert list(judge_problems(FunctionJudge(f"{__name__}:by_tool"), transcript())) == []


def test_a_judge_that_scores_every_answer_alike_is_reported() -> None:
    (reason,) = judge_problems(FunctionJudge(f"{__name__}:blind"), transcript())
    assert "gave 1 to the answer" in reason.seen
