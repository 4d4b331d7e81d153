"""The sentinel's checks on frozen records: what each one sees, and what it does not cry over."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ratchet.store.records import Round, ToolCall, Trajectory, Transcript
from ratchet.store.states import RoundState, ToolOutcome, ToolResult, TrajectoryState
from ratchet.trainer.observability.metrics import Finding
from ratchet.trainer.sentinel.checks import (
    ToolHistory,
    TrajectoryBehavior,
    check_tool_health,
    names_in,
    occurs,
    read_behavior,
)
from ratchet.trainer.sentinel.sentinel import (
    INVALID_CALLS,
    QUESTIONS,
    WINDOW,
    RateHistory,
    check_drift,
    check_resource_coverage,
    check_rounds,
    check_tool_coverage,
    check_versions,
    unnecessary_tool_calls,
)
from ratchet.trainer.settings.trainer_settings import SentinelSettings
from ratchet.trainer.statistics import mean_change, share_change
from tests.harness.records import TOOLS

SETTINGS = SentinelSettings()
OK, ERROR, EMPTY = ToolResult.OK, ToolResult.ERROR, ToolResult.EMPTY


def calls(results: Sequence[ToolResult], version: int = 1, **changes: Any) -> list[ToolCall]:
    """Tool calls, the newest first."""
    values: dict[str, Any] = {
        "call_id": "c", "choice": 0, "place": 0, "alias": "agent", "version": version, "tool": "search",
        "tool_call_id": "i", "outcome": ToolOutcome.VALID,
    }  # fmt: skip
    return [ToolCall(**(values | {"result": result} | changes)) for result in results]


def one(findings: Sequence[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


# --- tool health ----------------------------------------------------------------------------------------------


def test_a_tool_that_fails_more_than_under_the_same_version_holds_training() -> None:
    newest = calls([ERROR] * 30 + [OK] * 20) + calls([OK] * 190 + [ERROR] * 10)
    (found,), _ = check_tool_health(newest, SETTINGS)
    assert (found.subject, found.value, found.blocks_training) == ("search", 0.6, True)
    assert found.reason == (
        "tool 'search' failed in 30 of its last 50 calls (30 error), up from 5% under the same version: fix the tool"
    )


def test_failures_that_begin_with_a_version_are_an_alarm_and_do_not_pause_training() -> None:
    (found,), _ = check_tool_health(calls([ERROR] * 40 + [OK] * 10, version=2) + calls([OK] * 200), SETTINGS)
    assert "it began with version 2" in str(found.reason)
    assert not found.blocks_training


def test_a_tool_that_was_always_flaky_is_no_alarm() -> None:
    (found,), _ = check_tool_health(calls([ERROR, OK] * 300), SETTINGS)
    assert found == Finding("tool_health", "ratchet_tool_failure_ratio", "search", 0.5)


def test_a_tool_that_always_fails_pauses_training_without_history() -> None:
    (found,), _ = check_tool_health(calls([ToolResult.TIMEOUT] * 50), SETTINGS)
    assert found.blocks_training
    assert "raise max_tool_failure_rate" in str(found.reason)


def test_a_few_failures_say_nothing() -> None:
    assert check_tool_health(calls([ERROR] * 15), SETTINGS) == ([], {})
    (found,), _ = check_tool_health(calls([ERROR] * 20), SETTINGS)  # less than tool_calls, and no past
    assert found.reason is None


def test_what_the_policy_did_wrong_does_not_count_against_the_tool() -> None:
    wrong = calls([ERROR] * 300, outcome=ToolOutcome.SCHEMA_VIOLATION)
    (found,), _ = check_tool_health(wrong + calls([OK] * 100), SETTINGS)
    assert (found.value, found.reason) == (0.0, None)


def test_a_long_sickness_does_not_become_its_own_past() -> None:
    sick = calls([ERROR] * 2000)
    settings = SentinelSettings(max_tool_failure_rate=1.0)
    milder = calls([ERROR, ERROR, ERROR, OK] * 500)
    assert check_tool_health(milder, settings)[0][0].reason is None  # nothing else is known
    kept = {"search": ToolHistory(failures=5, calls=100, same_versions=True)}
    (found,), pasts = check_tool_health(milder, settings, kept)
    assert found.blocks_training
    assert pasts == kept
    assert check_tool_health(sick, settings, kept)[0][0].blocks_training


def test_an_empty_result_counts_only_against_the_tools_own_past() -> None:
    settings = SentinelSettings()
    (usual,), _ = check_tool_health(calls([EMPTY, OK] * 200), settings)
    (risen,), _ = check_tool_health(calls([EMPTY] * 40 + [OK] * 10) + calls([OK] * 200), settings)
    assert usual.reason is None
    assert risen.blocks_training


# --- behavior ---------------------------------------------------------------------------------------------------


def transcript(messages: Sequence[dict[str, Any]]) -> Transcript:
    run = Trajectory(
        id="t", alias="agent", version=0, state=TrajectoryState.SEALED, task="mail/1", root_node="r",
        tools_hash="", key_id=None, opened_at=1.0, last_active_at=2.0,
    )  # fmt: skip
    return Transcript(trajectory=run, calls=(), messages=tuple(messages), tools=tuple(TOOLS))


def asks_tool(**arguments: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "Let me look.", "tool_calls": [{"id": "c", "function": function}]}


def test_arguments_that_occur_nowhere_before_the_call_are_hallucinated() -> None:
    behavior = read_behavior(
        transcript(
            [
                {"role": "user", "content": "When did Anna write of the invoice 4711?"},
                asks_tool(
                    query="invoice from Anna", sender="bob@example.com", limit=5, order={"ids": ["4711", "9999"]}
                ),
                {"role": "tool", "content": '{"id": "m-42"}'},
                asks_tool(id="m-42"),
                {"role": "assistant", "content": "In May."},
            ]
        )
    )
    assert (behavior.arguments, behavior.hallucinated) == (5, 2)  # bob@example.com and 9999
    assert (behavior.tool_calls, behavior.actions) == (2, 3)
    assert behavior.used == behavior.offered == {"search"}


@pytest.mark.parametrize(
    ("value", "context", "known"),
    [
        ("Anna Berg", "a note by anna", True),
        ("Zoe Lund", "a note by anna", False),
        ("2026-01-04", "on 2026-01-04 at noon", True),
        ("2026-01-05", "on 2026-01-04 at noon", False),
        ("10", "", None),
        ("", "", None),
        ("ok", "", None),
    ],
)
def test_what_counts_as_known(value: str, context: str, known: bool | None) -> None:
    assert occurs(value, context) is known


def test_hostile_arguments_cost_little_and_break_nothing() -> None:
    deep = "[" * 100_000
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": deep}}, "x", None]}
    ]
    messages += [{"role": "assistant", "content": 7, "tool_calls": {"a": 1}}]
    messages += [asks_tool(**{f"k{n}": f"value{n}" for n in range(5000)})]
    assert read_behavior(transcript(messages)).arguments == 200


# --- drift --------------------------------------------------------------------------------------------------------


def conducts(count: int, family: str = "task:mail", **changes: Any) -> list[TrajectoryBehavior]:
    base = TrajectoryBehavior("t", family, "c", 100, 20.0, 4, 3, 4, 0, frozenset({"search"}), frozenset({"search"}))
    return [
        dataclasses.replace(base, sampled_tokens=base.sampled_tokens + n % 7, trajectory_id=f"t{n}", **changes)
        for n in range(count)
    ]


def test_healthy_traffic_has_numbers_and_no_alarm() -> None:
    findings = check_drift(conducts(300), SETTINGS)
    assert [found.reason for found in findings] == [None] * len(findings)
    assert {found.metric for found in findings} == {
        "ratchet_trajectory_tokens", "ratchet_reasoning_tokens_per_action", "ratchet_actions_per_trajectory",
        "ratchet_hallucinated_argument_ratio", "ratchet_tool_use_ratio", "ratchet_resource_use_ratio",
    }  # fmt: skip


def test_answers_that_grow_are_length_drift() -> None:
    longer = [dataclasses.replace(behavior, sampled_tokens=behavior.sampled_tokens * 3) for behavior in conducts(64)]
    found = one(check_drift(conducts(300) + longer, SETTINGS), "length_drift")
    assert found.reason is not None
    assert "went from 103 to 309 in task:mail" in found.reason


def test_another_mix_of_tasks_is_no_length_drift() -> None:
    long_tasks = [
        dataclasses.replace(behavior, sampled_tokens=900 + n % 5)
        for n, behavior in enumerate(conducts(40, "task:book"))
    ]
    mixed = long_tasks[:20] + conducts(300) + long_tasks + conducts(24)
    assert one(check_drift(mixed, SETTINGS), "length_drift").reason is None


def test_reasoning_that_vanishes_is_drift() -> None:
    findings = check_drift(conducts(300) + conducts(64, reasoning_tokens=1.0), SETTINGS)
    assert "went from 5 to 0" in str(one(findings, "reasoning_drift").reason)


def test_a_rising_share_of_hallucinated_arguments_is_an_alarm() -> None:
    found = one(check_drift(conducts(300) + conducts(64, hallucinated=2), SETTINGS), "hallucinated_arguments")
    assert found.value == 0.5
    assert re.search(r"50% of tool arguments .* up from 0%", str(found.reason))
    assert one(check_drift(conducts(364, hallucinated=2), SETTINGS), "hallucinated_arguments").reason is None


def test_a_tool_that_nobody_uses_is_neglected_once_enough_could_have() -> None:
    both = frozenset({"search", "read"})
    assert [found.reason is None for found in check_tool_coverage(conducts(99, offered=both), SETTINGS)] == [True, True]
    read, search = check_tool_coverage(conducts(100, offered=both), SETTINGS)
    assert re.search(r"'read' .* 0.0% of the last 100 trajectories", str(read.reason))
    assert (search.value, search.reason) == (1.0, None)


FILES = frozenset(f"docs/page{number}.md" for number in range(20))


def test_files_that_nobody_opens_are_neglected_once_enough_were_shown_them() -> None:
    def seen(count: int, opened: int) -> list[TrajectoryBehavior]:
        names = frozenset(sorted(FILES)[:opened])
        return conducts(count, shown=FILES, opened=names)

    def found(*runs: TrajectoryBehavior) -> Finding:
        return check_resource_coverage(runs, SETTINGS)

    assert found(*seen(99, 0)).reason is None
    neglected = found(*seen(300, 1))
    assert (neglected.check, neglected.metric) == ("resource_coverage", "ratchet_resource_use_ratio")
    assert neglected.value == pytest.approx(0.05)
    assert "19 of 20 files" in str(neglected.reason)
    assert "and 14 more" in str(neglected.reason)
    assert "min_resource_coverage" in str(neglected.reason)
    assert found(*seen(300, 2)).reason is None
    assert found(*conducts(300, shown=frozenset(sorted(FILES)[:4]))).reason is None, "four tell nothing"
    assert check_resource_coverage(seen(300, 0), SentinelSettings(min_resource_coverage=0.0)).reason is None


def test_a_trajectory_is_shown_and_opens_what_is_written_like_a_resource() -> None:
    run = read_behavior(
        transcript(
            [
                {
                    "role": "system",
                    "content": "Read src/main.py, README.md and/or https://a.example/x?y=1. 2026-01-04",
                },
                asks_tool(command="cat src/main.py | head", ids=["m-42"]),
                {"role": "tool", "content": '{"message_id": "m-42", "path": "/etc/hosts"}'},
            ]
        )
    )
    assert run.shown == {"src/main.py", "README.md", "https://a.example/x?y=1", "m-42", "/etc/hosts"}
    assert run.opened == {"src/main.py", "m-42"}


def test_hostile_names_cost_little_and_steer_no_terminal() -> None:
    long = "a-" * 200_000 + "/" * 200_000 + " ".join(f"file{number}.txt" for number in range(5000))
    assert len(names_in([long, "x" * 10_000_000])) == 0
    assert len(names_in([" ".join(f"file{number}.txt" for number in range(5000))])) == 100
    ugly = frozenset(f"/tmp/\x1b[2J{number}" for number in range(9))
    reason = str(check_resource_coverage(conducts(200, shown=ugly), SETTINGS).reason)
    assert "\x1b" not in reason


def test_tools_called_where_none_is_needed_are_counted() -> None:
    easy = conducts(4, cohort="easy")
    easy[0] = dataclasses.replace(easy[0], tool_calls=0)
    hard = [
        dataclasses.replace(behavior, trajectory_id=f"h{behavior.trajectory_id}")
        for behavior in conducts(4, cohort="hard")
    ]
    scores = {"t0": 1.0, "t1": 1.0, "t2": 0.0, "t3": 0.0, "ht0": 1.0, "ht1": 0.0, "ht2": 0.0, "ht3": 0.0}
    found = unnecessary_tool_calls(easy + hard, scores)
    assert found is not None
    assert found.value == 9 / 4
    assert unnecessary_tool_calls(hard, scores) is None


# --- rounds -------------------------------------------------------------------------------------------------------


def rounds(count: int, **metrics: Any) -> list[Round]:
    behavior = {
        "fresh_tokens_compared": 100, "fresh_logprob_abs_diff_mean": 0.001, "tokens_trained": 100,
        "untrained_tokens": {},
    }  # fmt: skip
    held = Round(
        id="r", alias="agent", state=RoundState.COMMITTED, from_version=0, to_version=1, started_at=1.0, ended_at=2.0,
        checkpoint="x", metrics=behavior | metrics, reason=None,
    )  # fmt: skip
    return [held] * count


def test_trainer_and_engine_that_disagree_are_an_alarm() -> None:
    assert check_rounds(rounds(1))[0].reason is None
    found = one(check_rounds(rounds(1, fresh_logprob_abs_diff_mean=0.9) + rounds(4)), "logprob_mismatch")
    assert found.value == pytest.approx(0.1808)
    assert "same weights, dtype" in str(found.reason)


def test_rows_of_older_versions_are_no_disagreement_of_trainer_and_engine() -> None:
    stale = rounds(5, tokens_compared=100, logprob_abs_diff_mean=0.9, fresh_tokens_compared=0)
    assert check_rounds(stale)[0].reason is None


def test_tokens_that_are_mostly_left_out_are_an_alarm_with_the_reasons() -> None:
    found = one(check_rounds(rounds(2, untrained_tokens={"greedy": 300, "aborted": 1})), "untrained_tokens")
    assert re.search(r"75% .* last 2 rounds", str(found.reason))
    assert "600 tokens greedy (" in str(found.reason)


@pytest.mark.parametrize(("rejected", "alarmed"), [(0, False), (32, False), (33, True)])
def test_more_than_a_quarter_of_the_newest_rounds_rows_rejected_is_an_alarm(rejected: int, alarmed: bool) -> None:
    newest = rounds(1, rows=128, rows_rejected=rejected, logprob_abs_diff_mean=0.06)
    found = one(check_rounds(newest + rounds(4, rows=128, rows_rejected=128)), "rows_rejected")
    assert (found.metric, found.value) == ("ratchet_rejected_row_ratio", rejected / 128)
    assert (found.reason is not None) is alarmed


def test_the_alarm_about_rejected_rows_tells_old_rows_from_another_number_format() -> None:
    figures = {"rows": 8, "rows_rejected": 6, "logprob_abs_diff_mean": 0.06}
    reason = str(one(check_rounds(rounds(1, **figures)), "rows_rejected").reason)
    assert reason.startswith("6 of 8 rows rejected (75%)")
    assert "all rows differ by 0.060 nats a token" in reason
    assert "first version sampled by: 0.001." in reason
    for remedy in ("vllm.dtype, learner.dtype", "`ratchet status`", "learner.learning_rate"):
        assert remedy in reason
    old = one(check_rounds(rounds(1, **figures, fresh_tokens_compared=0)), "rows_rejected")
    assert "there are none" in str(old.reason)


def test_before_the_first_round_there_is_nothing_to_say() -> None:
    assert check_rounds([]) == []
    assert check_drift([], SETTINGS) == []


# --- change -------------------------------------------------------------------------------------------------------


def test_a_change_needs_enough_values_and_more_than_chance() -> None:
    assert mean_change([1.0] * 15, [9.0] * 100) is None
    assert share_change((1, 15), (9, 100)) is None
    noise = mean_change([float(n % 10) for n in range(100)], [float(n % 10) for n in range(5, 95)])
    assert noise is not None
    assert abs(noise.sigmas) < 1
    grown = mean_change([1.0] * 20, [2.0] * 20)
    assert grown is not None
    assert (grown.ratio, grown.sigmas) == (2.0, float("inf"))


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
