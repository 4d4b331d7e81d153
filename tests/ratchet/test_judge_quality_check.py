"""The doctor's proof about the judge: on recorded trajectories where there are any, else on a given question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.checks.check_result import CheckResult
from ratchet.checks.judge_quality_check import JudgeExample, proof
from ratchet.store.records import REQUESTED, Feedback
from ratchet.store.store import Store
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.kinds.given_scores import FeedbackJudge
from ratchet.trainer.settings.judge_specs import FeedbackSpec
from tests.harness.records import answered_trajectory

CODE = """
def half(response):
    return 1.0 if response == "Oslo" else 0.5 * bool(response.strip())

def careless(response):
    return float("Oslo" in response)

def crashes(response):
    raise ValueError("no such table")

def exits(response):
    raise SystemExit(1)

def constant(response):
    return 0.5 * (len(response) >= 0)

def of_row(task, response):
    return 1.0 if response == task["capital"] else 0.5 * bool(response.strip())
"""
EXAMPLE = JudgeExample.of("What is the capital of Norway?", "Oslo")


def proven(store: Store, folder: Path, name: str, example: JudgeExample | None = None) -> CheckResult:
    (folder / "proved.py").write_text(CODE)
    return proof(FunctionJudge(f"{folder}/proved.py:{name}"), "function", store, "agent", example)


@pytest.mark.parametrize(
    ("name", "passed", "seen"),
    [
        ("half", True, "on the given question"),
        ("careless", False, "is fooled by"),
        ("crashes", False, "crashes on the right answer: ValueError: no such table"),
        ("exits", False, "it called sys.exit(1)"),
        ("constant", False, "is fooled by 11 of 11"),
        ("of_row", False, "crashes on the right answer"),
    ],
)
def test_without_traffic_the_lint_checks_the_judge_on_the_given_question(
    store: Store, tmp_path: Path, name: str, passed: bool, seen: str
) -> None:
    found = proven(store, tmp_path, name, EXAMPLE)
    assert (found.name, found.passed) == ("judge", passed)
    assert seen in found.seen
    assert passed is (found.remedy == "")


@pytest.mark.parametrize("name", ["half", "crashes", "of_row"])
def test_without_traffic_and_question_the_judge_is_not_checked_which_is_no_failure(
    store: Store, tmp_path: Path, name: str
) -> None:
    found = proven(store, tmp_path, name)
    assert (found.skipped, found.failed) == (True, False)
    assert found.seen == "not checked: no recorded call yet; run the agent, or give --question and --answer"


def test_a_judge_that_reads_the_tasks_row_is_checked_on_a_given_row(store: Store, tmp_path: Path) -> None:
    found = proven(store, tmp_path, "of_row", JudgeExample.of('{"capital": "Oslo"}', "Oslo"))
    assert found.passed, found
    with pytest.raises(ValueError, match="Expecting"):
        JudgeExample.of("{capital}", "Oslo")


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("name", "passed", "seen"),
    [
        ("half", True, "scored 2 recorded trajectories, 0.5 to 1, "),
        ("crashes", False, "fails on 2 of 2: ValueError: no such table"),
        ("exits", False, "it called sys.exit(1)"),
        ("constant", False, "gave 0.5 to the answer, to an empty answer"),
    ],
)
def test_with_traffic_recorded_trajectories_check_the_judge(
    store: Store, tmp_path: Path, name: str, passed: bool, seen: str, grouped: bool
) -> None:
    for run, answer in (("t1", "Oslo"), ("t2", "Rome")):
        answered_trajectory(store, run, answer)
    if grouped:
        store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
        store.groups.create("k", "agent", ["t1", "t2"], now=101.0)
    found = proven(store, tmp_path, name)
    assert found.passed is passed
    assert seen in found.seen
    assert store.groups.newest_judge_version("agent") is None, "nothing is recorded"


def test_live_trajectories_with_feedback_are_found_behind_groups_with_rewards_of_a_caller(store: Store) -> None:
    def checked() -> str:
        return proof(FeedbackJudge(FeedbackSpec(kind="feedback")), "feedback", store, "agent").seen

    for name in ("g1", "g2"):
        answered_trajectory(store, name, purpose="gathered")
        store.trajectories.seal(name, 100.0)
    store.groups.create(f"{REQUESTED}tune_1:0", "agent", ["g1", "g2"], now=101.0)
    assert "feedback needs traffic" in checked()
    for name in ("t1", "t2", "t3"):
        answered_trajectory(store, name)
    given: Any = {"kind": "trajectory", "source": "operator", "given_at": 5.0, "trusted": True}
    store.feedback.add([Feedback(id=f"fb_{name}", target=name, value=1.0, **given) for name in ("t1", "t2")])
    assert checked() == "feedback scored 2 recorded trajectories, 1 to 1"
