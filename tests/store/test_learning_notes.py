"""Notes on learning, and behavior by version with its waiting times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from ratchet.store.records import PastScore, ToolCall, Verdict
from ratchet.store.reports.learning_report import (
    LearningReport,
    Movement,
    describe_collapse,
    describe_stall,
    learning_report,
    movement_of,
    recent_movements,
    tallies,
)
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from ratchet.store.training.observations import ToolTime
from tests.harness.records import answered_trajectory, call_start, commit_round, ended


def exact(version: int, right: int, count: int, tasks: int = 20) -> list[PastScore]:
    """So many right answers among so many, spread evenly over tasks."""
    return [
        PastScore(
            trajectory_id=f"{version}-{number}", family="mail", cohort=f"mail/{number % tasks}", version=version,
            score=float((number * right) % count < right), judged_at=version * 1e6 + number,
        )
        for number in range(count)
    ]  # fmt: skip


def report(*traffic: list[PastScore], moved: Sequence[Movement] = ()) -> LearningReport:
    return learning_report(tallies([one for version in traffic for one in version]), moved)


def moved(k3: float, *, good: float = 0.0, rate: float = 1e-5, floor: float = 1e-9) -> Movement:
    return Movement(version=3, k3=k3, logprob_change_positive=good, rate=rate, floor=floor)


def note(found: LearningReport, word: str) -> str:
    return next((note for note in found.notes if note.startswith(word)), "")


def test_the_reported_number_of_missing_scores_decides_and_half_of_it_does_not() -> None:
    before = exact(0, 300, 1000)
    whole = report(before, exact(1, 36, 100)).families[0]
    assert whole.gain.verdict == "unknown"
    assert whole.more_scores is not None
    more = 100 * -(-whole.more_scores // 100)
    for count, verdict in ((100 + more, "better"), (100 + more // 2 // 100 * 100, "unknown")):
        assert report(before, exact(1, count * 36 // 100, count)).families[0].gain.verdict == verdict
    assert f"about {whole.more_scores} more scores of @1" in note(report(before, exact(1, 36, 100)), "missing")


def test_where_the_scores_before_are_too_few_a_comparison_side_by_side_is_named() -> None:
    found = report(exact(0, 15, 50), exact(1, 32, 100))
    assert found.families[0].more_scores is None
    assert re.search("50 scores of @0.*; `ratchet eval`", note(found, "missing"))
    assert note(report(exact(0, 10, 100), exact(1, 90, 100)), "missing") == ""  # it is decided


def test_pooled_and_excluded_versions_are_named_with_the_reason() -> None:
    found = report(exact(0, 3, 10), exact(1, 9, 30), exact(2, 50, 100), exact(3, 90, 200), exact(4, 6, 12))
    assert re.search("before: @0 to @1 .* 10 scores .* 30", note(found, "before"))
    assert re.search("after: @3 to @4 .* 12 scores .* 30", note(found, "after"))
    assert note(found, "left out") == "left out: @2, between the two sides"
    alone = report(exact(0, 15, 50), exact(1, 150, 394), exact(2, 30, 75))
    assert re.search("after: @2 alone,.* 30 scores", note(alone, "after"))


def test_an_interval_that_is_wide_for_its_few_tasks_is_explained() -> None:
    few = report(exact(0, 300, 1000, tasks=4), exact(1, 340, 1000, tasks=4))
    assert re.search("wide because there are 4", note(few, "on the same tasks"))
    assert note(report(exact(0, 300, 1000, tasks=500), exact(1, 340, 1000, tasks=500)), "on the same tasks") == ""


def test_too_few_scores_are_reported_with_the_missing_number() -> None:
    assert re.search("30 scores; .* 18 in all, 42 are missing", report(exact(0, 3, 9), exact(1, 3, 9)).missing or "")
    assert (report(exact(0, 9, 40), exact(1, 3, 9)).missing or "").endswith("21 are missing")


def test_steps_too_small_are_named_only_where_no_gain_is_seen() -> None:
    unchanged = [moved(2e-8), moved(3e-8), moved(1e-8)]
    flat, better = (exact(0, 200, 1000), exact(1, 202, 1000)), (exact(0, 200, 1000), exact(1, 400, 1000))
    words = note(report(*flat, moved=unchanged), "the steps are too small")
    assert re.search("2.9e-08 nats .* rate 1e-05; set learner.learning_rate: auto", words)
    assert note(report(*better, moved=unchanged), "the steps are too small") == ""
    assert note(report(*flat, moved=[moved(0.004), *unchanged]), "the steps are too small") == ""
    assert describe_stall(unchanged[:2]) is None


@pytest.mark.parametrize(
    ("k3", "floor", "means"),
    [
        (2e-8, 1e-9, "2e-08 nats .* rate 1e-05: too small"),
        (0.0022, 0.002, "0.0022 nats .* rate 1e-05, of which 0.002 is rounding: not distinguishable"),
        (0.0018, 0.002, "not distinguishable"),  # k3 of unchanged weights scatters about its floor
        (0.007, 0.002, "0.007 nats .* rate 1e-05, of which 0.002 is rounding: healthy"),
        (5e-4, 1e-6, "healthy"),
        (0.3, 0.002, "0.3 nats .* rate 1e-05: too large: .* collapse"),
        (0.055, 0.02, "healthy"),
    ],
)
def test_a_movement_is_described_with_its_meaning_above_the_floor(k3: float, floor: float, means: str) -> None:
    assert re.search(means, moved(k3, floor=floor).describe())


def test_steps_that_rounding_hides_are_named_with_the_format_that_shows_them() -> None:
    words = describe_stall([moved(0.0021, floor=0.002), moved(0.0018, floor=0.002), moved(3e-5, floor=1e-5)])
    assert words is not None
    assert re.search(r"rounding .*\(0\.002 nats .* rate 1e-05.* learner\.dtype and vllm\.dtype to float32", words)
    assert describe_stall([moved(0.0021, floor=0.002), moved(0.007, floor=0.002), moved(3e-5)]) is None


def test_a_small_round_that_was_meant_to_take_a_small_step_is_not_called_too_small() -> None:
    figures = {
        "approx_kl": 3e-5,
        "approx_kl_tokens": 9,
        "logprob_change_positive_mean": 0.0,
        "learning_rate": 2e-4,
        "approx_kl_floor": 1e-9,
    }
    sizes = [found.size for scale in (1.0, 0.1) if (found := movement_of(figures | {"rate_scale": scale})) is not None]
    assert sizes == ["too small", "healthy"]


def test_a_round_that_makes_good_answers_less_likely_warns_of_collapse() -> None:
    assert [moved(0.1, good=gap).collapsing for gap in (0.01, -0.005, -0.02, -0.15)] == [False, False, True, True]
    text = describe_collapse(moved(0.1, good=-0.15))
    assert re.search(r"less likely \(-0\.150 nats .* lower learner\.learning_rate .* learner\.target_kl", text)


def test_the_last_rounds_are_read_from_the_store_and_older_ones_say_nothing(store: Store) -> None:
    store.policies.register_base("agent", "agent")
    figures: list[dict[str, Any]] = [
        {},
        {
            "approx_kl": 0.004,
            "approx_kl_tokens": 9,
            "logprob_change_positive_mean": 0.1,
            "learning_rate": 2e-3,
            "approx_kl_floor": 1e-9,
        },
    ]
    for version, metrics in enumerate(figures, 1):
        commit_round(store, "agent", version, checkpoint="c", metrics=metrics)
    store.rounds.start("agent", 2)
    assert recent_movements(store, "agent") == [Movement(2, 0.004, 0.1, 2e-3, 1e-9)]
    assert movement_of({}) is None


OK, WRONG = (ToolOutcome.VALID, ToolResult.OK), (ToolOutcome.UNKNOWN_TOOL, ToolResult.ERROR)


def _called(store: Store, version: int, name: str, *calls: tuple[str, tuple[ToolOutcome, ToolResult | None]]) -> None:
    found = [
        ToolCall(call_id=f"call_{name}", choice=0, place=place, alias="agent", version=version, tool=tool,
                 tool_call_id=f"c{place}", outcome=outcome, result=result)
        for place, (tool, (outcome, result)) in enumerate(calls)
    ]  # fmt: skip
    store.tools.record_tool_calls(found, [])


def test_behavior_is_measured_per_trajectory_of_a_version(store: Store) -> None:
    store.policies.register_base("agent", "agent")
    for name in ("a", "b"):
        answered_trajectory(store, name)
    more = call_start("call_b2", "b", at=3.0)
    store.calls.ship([ended(more, {"role": "assistant", "content": "x"}, ids=(4, 5, 6, 7))])
    answered_trajectory(store, "open", at=50.0)
    _called(store, 0, "a", ("search", OK), ("search", OK), ("read", OK))
    _called(store, 0, "b", ("search", WRONG))
    for name in ("a", "b"):
        store.trajectories.seal(name, now=9.0)
    (behavior,) = store.behavior.by_version("agent")
    means = {name: found.mean for name, found in behavior.means.items()}
    assert (behavior.version, behavior.trajectories) == (0, 2)
    assert means == {"calls": 1.5, "tool_calls": 2.0, "sampled_tokens": 4.0, "seconds": 1.5}
    assert (behavior.means["calls"].low or 0) < 1.5 < (behavior.means["calls"].high or 0)
    assert (behavior.invalid_tool_calls, behavior.failed_tool_calls, behavior.truncated_answers) == (0.25, 0.25, 0.0)
    used = {one.tool: (one.per_trajectory, one.trajectory_share) for one in behavior.tools}
    assert used == {"search": (1.5, 1.0), "read": (0.5, 0.5)}
    assert store.behavior.by_version("nobody") == []


def test_the_time_of_a_tool_runs_from_the_answer_that_asks_for_it_to_the_call_with_its_result(store: Store) -> None:
    store.policies.register_base("agent", "agent")
    waits = {"a": 0.25, "b": 2.0, "c": 0.5}
    for name, wait in waits.items():
        answered_trajectory(store, name)  # from 1.0 to 1.5
        continued: dict[str, Any] = {"parent_call": f"call_{name}", "parent_choice": 0}
        for number, at in enumerate((1.5 + wait, 60.0)):  # the second one continues the same answer again
            later = call_start(f"call_{name}{number}", name, at=at, **continued)
            store.calls.ship([ended(later, {"role": "assistant", "content": "x"})])
        _called(store, 0, name, ("search", OK))
    answered_trajectory(store, "cut")  # its tool never returned
    _called(store, 0, "cut", ("search", (ToolOutcome.VALID, None)), ("read", (ToolOutcome.VALID, None)))
    for name in (*waits, "cut"):
        store.trajectories.seal(name, now=90.0)
    (behavior,) = store.behavior.by_version("agent")
    times = {one.tool: one.seconds for one in behavior.tools}
    assert times == {"search": ToolTime(count=3, p50=0.5, p95=2.0), "read": None}


def test_waiting_times_follow_a_trajectory_from_its_first_call_to_the_version_that_serves(store: Store) -> None:
    store.policies.register_base("agent", "agent")
    assert store.waiting_times.stages("agent") == []
    for name in ("a", "b"):
        answered_trajectory(store, name, at=10.0)
        store.trajectories.seal(name, now=30.5)
    group = store.groups.create("task:t", "agent", ["a", "b"], now=34.5)
    store.groups.record_verdicts(
        group.id,
        [Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=1.0, judged_at=at)
         for name, at in (("a", 36.5), ("b", 40.5))],
    )  # fmt: skip
    commit_round(store, "agent", 1, checkpoint="c", groups=[group.id])
    store.policies.promote("agent", 1, {}, by="anna", reason="looked at it")
    found = {one.stage: one for one in store.waiting_times.stages("agent")}
    assert list(found) == ["rollout", "sealing", "grouping", "judging", "round", "training", "serving"]
    assert {name: found[name].p50 for name in ("rollout", "sealing", "grouping", "judging")} == {
        "rollout": 0.5, "sealing": 20.0, "grouping": 4.0, "judging": 2.0,
    }  # fmt: skip
    assert (found["judging"].p99, found["judging"].count, found["serving"].count) == (6.0, 2, 1)
