"""The judge `behavior`: its rules, what is refused, and a composite in which it never buries a success."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from ratchet.store.store import Store
from ratchet.trainer.errors import JudgeError
from tests.harness.records import answered_trajectory
from tests.trainer.test_judge_functions import BROKEN, GOOD, LAST, SLOW, with_tools
from tests.trainer.test_rules import answers, made, member


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"rule": "pattern"}, "needs `pattern`"),
        ({"rule": "pattern", "pattern": "("}, "not a regular expression"),
        ({"rule": "pattern", "pattern": ".*"}, "matches every response; use a pattern that only a good response"),
        ({"rule": "short", "limit": 1}, "set limit to the longest good length"),
        ({"rule": "brief"}, "rule: Input should be"),
        ({"rule": "ended", "limits": 3}, "limits: Extra inputs"),
    ],
)
def test_a_rule_that_is_wrong_or_scores_all_alike_is_refused(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(JudgeError, match=f"judge behavior: .*{wrong}"):
        made(kind="behavior", **settings)


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        ({"rule": "pattern", "pattern": "Oslo"}, [1.0, 0.0]),
        ({"rule": "pattern", "pattern": r"\S.*"}, [1.0, 1.0]),
        ({"rule": "ended"}, [1.0, 1.0]),
        ({"rule": "few_tool_calls", "limit": 2}, [1.0, 1.0]),
    ],
)
def test_a_rule_scores_each_trajectory_by_itself(settings: dict[str, Any], scores: list[float]) -> None:
    verdicts = made(kind="behavior", **settings).judge("g", [member("Oslo"), member("It is Oslo")]).verdicts
    assert [verdict.score for verdict in verdicts] == scores


def test_the_rule_short_falls_to_0_at_its_limit(store: Store) -> None:
    answered_trajectory(store, "t")
    run = store.trajectories.read("t")
    sampled = sum(call.completion_tokens for call in run.calls)
    assert made(kind="behavior", rule="short", limit=2 * sampled).judge("g", [run]).verdicts[0].score == 0.5
    assert made(kind="behavior", rule="short", limit=sampled).judge("g", [run]).verdicts[0].score == 0.0


def test_the_rule_tools_is_the_share_of_tool_calls_that_fit_and_did_not_fail(store: Store) -> None:
    members = [
        with_tools(store, "t1", GOOD, LAST),
        with_tools(store, "t2", GOOD, GOOD, BROKEN, SLOW),
        with_tools(store, "t3"),
        with_tools(store, "t4", BROKEN),
    ]
    scores = [verdict.score for verdict in made(kind="behavior", rule="tools").judge("g", members).verdicts]
    assert scores == [1.0, 0.5, 1.0, 0.0]


def weighed(tmp_path: Path, *, right: float, tools: float, penalty: float = 0.0) -> dict[str, Any]:
    right_answer = {"kind": "answer", "answers": answers(tmp_path, '{"task": "capital", "answer": "Oslo"}')}
    parts: list[dict[str, Any]] = [
        {"name": "right", "judge": right_answer, "weight": right},
        {"name": "tools", "judge": {"kind": "behavior", "rule": "tools"}, "weight": tools},
    ]
    if penalty:
        short = {"kind": "behavior", "rule": "short", "limit": 100}
        parts.append({"name": "short", "judge": short, "penalty": penalty})
    return {"kind": "composite", "parts": parts}


def test_a_success_with_failing_tools_ranks_above_a_failure_with_good_ones(store: Store, tmp_path: Path) -> None:
    judge = made(**weighed(tmp_path, right=0.75, tools=0.25, penalty=0.25))
    task = {"task": "capital"}
    answered_trajectory(store, "x", **task)
    right = msgspec.structs.replace(with_tools(store, "t1", BROKEN), messages=member("Oslo").messages)
    wrong = msgspec.structs.replace(with_tools(store, "t2", GOOD), messages=member("Rome").messages)
    both = [
        msgspec.structs.replace(one, trajectory=msgspec.structs.replace(one.trajectory, task="capital"))
        for one in (right, wrong)
    ]
    good, bad = judge.judge("g", both).verdicts
    assert good.components["tools"] == 0.0
    assert bad.components["tools"] == 1.0
    assert (good.score or 0.0) > (bad.score or 0.0)


@pytest.mark.parametrize(("right", "tools", "penalty"), [(0.5, 0.5, 0.0), (0.2, 0.8, 0.0), (0.75, 0.25, 0.5)])
def test_a_penalty_that_could_reverse_the_order_is_refused(
    tmp_path: Path, right: float, tools: float, penalty: float
) -> None:
    with pytest.raises(ValidationError, match="a success could rank below a failure"):
        made(**weighed(tmp_path, right=right, tools=tools, penalty=penalty))
