"""Behavior by version and waiting times: means per trajectory, tools, stages as percentiles."""

from __future__ import annotations

from typing import Any

from ratchet.store.records import ToolCall, Verdict
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from ratchet.store.training.observations import ToolTime
from tests.harness.records import answered_trajectory, call_start, commit_round, ended

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
