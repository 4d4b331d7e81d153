"""The check-up of a judge: answers are tried in the way in which the agent gives them."""

from __future__ import annotations

import json
from typing import Any

from ratchet.store.records import Trajectory, Transcript
from ratchet.store.states import TrajectoryState
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.tuner.rollouts.diagnosis import judge_problems
from tests.harness.records import TOOLS

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
