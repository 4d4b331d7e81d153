"""Rates by version: a version that calls wrongly, or asks in place of acting, raises an alarm; equal ones do not."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec
import pytest

from ratchet.store.records import ToolCall, Trajectory, Transcript
from ratchet.store.states import ToolOutcome, TrajectoryState
from ratchet.trainer.controller.sentinel.checks import TrajectoryBehavior, read_behavior
from ratchet.trainer.controller.sentinel.sentinel import INVALID_CALLS, QUESTIONS, WINDOW, RateHistory, check_versions
from ratchet.trainer.observability.metrics import Finding
from tests.harness.records import TOOLS

ROUND = 128  # trajectories from one version to the next


def behavior(
    version: int, invalid: int = 0, questions: int = 0, calls: int = 4, answers: int = 4
) -> TrajectoryBehavior:
    return TrajectoryBehavior(
        trajectory_id="", family="", cohort="", sampled_tokens=0, reasoning_tokens=0.0, actions=answers,
        tool_calls=calls, arguments=0, hallucinated=0, offered=frozenset({"search"}), used=frozenset(),
        version=version, answers=answers, questions=questions, checked_calls=calls, invalid_calls=invalid,
    )  # fmt: skip


def alarms(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(one.check, one.subject) for one in findings if one.reason]


def test_a_version_that_asks_in_place_of_acting_is_named_with_the_remedy() -> None:
    seen = [behavior(3)] * 60 + [behavior(4, questions=2)] * 40
    findings, histories = check_versions(seen)
    assert alarms(findings) == [(QUESTIONS, "4")]
    found = next(one for one in findings if one.reason)
    assert re.search(r"version 4: 50% .*question.* 0%", str(found.reason))
    assert (found.value, found.metric) == (0.5, "ratchet_question_ratio")
    assert histories == {QUESTIONS: RateHistory(60, 0.0, 0.0)}
    shown = {(one.check, one.subject): one.value for one in findings}
    assert shown[INVALID_CALLS, "3"] == shown[INVALID_CALLS, "4"] == 0.0


def test_the_rate_of_invalid_calls_is_a_mean_over_trajectories() -> None:
    seen = [behavior(3)] * 60 + [behavior(4, invalid=1, calls=1)] * 20 + [behavior(4, calls=100)] * 20
    findings, _ = check_versions(seen)
    assert alarms(findings) == [(INVALID_CALLS, "4")]
    assert next(one for one in findings if one.reason).value == 0.5


def test_a_few_trajectories_or_a_small_increase_say_nothing() -> None:
    assert not alarms(check_versions([behavior(3)] * 60 + [behavior(4, invalid=4)] * 31)[0])
    assert not alarms(check_versions([behavior(3)] * 31 + [behavior(4, invalid=4)] * 60)[0])
    slightly = [behavior(4, invalid=number % 2) for number in range(400)]  # 12.5%
    assert not alarms(check_versions([behavior(3)] * 400 + slightly)[0])
    assert check_versions([]) == ([], {})


def test_an_alarm_lasts_until_a_version_is_as_good_as_the_old_ones() -> None:
    bad = [behavior(4, questions=4)] * 300
    _, histories = check_versions([behavior(3)] * 60 + bad[:40])
    later, histories = check_versions(bad + [behavior(5, questions=4)] * 40, histories)
    assert alarms(later) == [(QUESTIONS, "5")], "the older versions in the window are as bad"
    gone, histories = check_versions(bad + [behavior(6)] * 40, histories)
    assert (alarms(gone), histories) == ([], {})


def test_the_counts_come_from_the_transcript() -> None:
    run = Trajectory(
        id="t", alias="agent", version=7, state=TrajectoryState.SEALED, task=None, root_node="r", tools_hash="",
        key_id=None, opened_at=1.0, last_active_at=2.0,
    )  # fmt: skip
    call = ToolCall(
        call_id="c", choice=0, place=0, alias="agent", version=7, tool="search", tool_call_id="i",
        outcome=ToolOutcome.VALID,
    )  # fmt: skip
    outcomes = (ToolOutcome.VALID, ToolOutcome.UNKNOWN_TOOL, ToolOutcome.INVALID_JSON, ToolOutcome.UNCHECKED)
    answers = ({"role": "assistant", "content": "Shall I?"}, {"role": "assistant", "content": "Done."})
    sampled = tuple(msgspec.structs.replace(call, outcome=outcome) for outcome in outcomes)
    messages = ({"role": "user", "content": "Find it?"}, *answers)
    found = read_behavior(
        Transcript(trajectory=run, calls=(), messages=messages, tools=tuple(TOOLS), tool_calls=sampled)
    )
    assert (found.version, found.answers, found.questions) == (7, 2, 1)
    assert (found.checked_calls, found.invalid_calls) == (3, 2)


def series(rng: random.Random, rate: float, bad: tuple[int, float] | None = None, versions: int = 50) -> list[int]:
    """Return after how many trajectories of its own the newest version raised each false or true alarm.

    Each round serves the version before, and the new one, by a coin. Trajectories make 1 to 8 calls whose rate differs
    between tasks. The window is checked after every 16 trajectories.
    """
    seen: list[TrajectoryBehavior] = []
    known: dict[str, RateHistory] = {}
    raised = []
    for version in range(1, versions + 1):
        for number in range(ROUND):
            served = version if rng.random() < 0.5 else version - 1
            now = bad[1] if bad is not None and served >= bad[0] else rate
            task = now + rng.choice((-1, 1)) * min(now, 1 - now) / 2
            calls = rng.randint(1, 8)
            seen.append(behavior(served, sum(rng.random() < task for _ in range(calls)), calls=calls))
            seen = seen[-WINDOW:]
            if number % 16 == 15:
                _, found = check_versions(seen, known)
                raised += [number + 1] if found.keys() - known.keys() else []
                known = found
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.8])
def test_in_fifty_equal_versions_there_is_hardly_ever_an_alarm(rate: float) -> None:
    rng = random.Random(int(100 * rate))
    assert sum(bool(series(rng, rate)) for _ in range(10)) <= 1


@pytest.mark.slow
def test_a_version_that_calls_wrongly_is_found_within_its_first_round() -> None:
    rng = random.Random(1)
    found = [series(rng, 0.05, bad=(6, 0.4), versions=7) for _ in range(50)]
    assert sum(bool(one) for one in found) == 50
    assert sorted(one[0] for one in found)[45] <= ROUND
