"""The watcher over a real store: alarms come, go by themselves, and hold training while tools are sick."""

from __future__ import annotations

import logging

import pytest

from ratchet.store.states import ToolResult
from ratchet.store.store import Store
from ratchet.trainer.sentinel import sentinel
from ratchet.trainer.sentinel.checks import read_behavior
from ratchet.trainer.sentinel.sentinel import Sentinel
from ratchet.trainer.settings.trainer_settings import SentinelSettings
from tests.harness import records
from tests.harness.records import answered_trajectory, call_start, ended
from tests.harness.trainer.agents import damage_tokens

EAGER = SentinelSettings(interval_seconds=1.0)


def tool_called(store: Store, name: str, result: ToolResult, times: int = 50, alias: str = "agent") -> None:
    """A trajectory whose only call called a tool so many times, with this result."""
    answered_trajectory(store, name, alias=alias)
    records.tool_called(store, name, result, times, alias)


def test_a_sick_tool_holds_training_and_a_mended_one_lets_it_go_on(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watching = Sentinel(EAGER, store, "agent")
    tool_called(store, "a1", ToolResult.OK, 200)
    assert not watching.check(1.0)
    tool_called(store, "a2", ToolResult.TIMEOUT)
    assert watching.check(2.0)
    alarms = {alarm.name: alarm.reason for alarm in store.alarms.active()}
    assert set(alarms) == {"tool_health:agent", "training_paused:agent"}
    assert alarms["training_paused:agent"].startswith(
        "training is paused, collecting and judging continue: tool 'search'"
    )
    assert "event=training_paused" in caplog.text
    tool_called(store, "a3", ToolResult.OK)
    assert not watching.check(3.0)
    assert store.alarms.active() == []
    assert "event=training_resumed" in caplog.text


def test_it_checks_no_more_often_than_configured(store: Store) -> None:
    watching = Sentinel(SentinelSettings(interval_seconds=30.0), store, "agent")
    watching.check(1.0)
    tool_called(store, "a1", ToolResult.TIMEOUT)
    assert not watching.check(30.0)
    assert watching.check(31.0)


def test_without_pause_training_a_sick_tool_is_an_alarm_and_training_goes_on(store: Store) -> None:
    tool_called(store, "a1", ToolResult.ERROR)
    assert not Sentinel(SentinelSettings(pause_training=False), store, "agent").check(1.0)
    assert [alarm.name for alarm in store.alarms.active()] == ["tool_health:agent"]


def test_the_tools_of_another_alias_hold_nobody_up(store: Store) -> None:
    tool_called(store, "b1", ToolResult.ERROR, alias="other")
    assert not Sentinel(EAGER, store, "agent").check(1.0)


def test_an_alarm_that_a_dead_trainer_left_is_cleared_by_the_next(store: Store) -> None:
    tool_called(store, "a1", ToolResult.ERROR)
    Sentinel(EAGER, store, "agent").check(1.0)
    tool_called(store, "a2", ToolResult.OK)
    Sentinel(EAGER, store, "agent").check(2.0)
    assert store.alarms.active() == []


def test_damaged_trajectories_hide_no_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "_MAX_READS", 2)
    tool_called(store, "a1", ToolResult.TIMEOUT)
    for name in ("a2", "a3", "a4"):
        tool_called(store, name, ToolResult.OK)
        damage_tokens(store, name)
    for name in ("a1", "a2", "a3", "a4"):
        store.trajectories.seal(name, 1.0)
    watching = Sentinel(EAGER, store, "agent")
    watching.check(1.0)
    assert watching.is_behind
    watching.check(2.0)
    assert not watching.is_behind


@pytest.mark.slow
def test_a_restart_does_not_make_a_long_sickness_a_tools_own_past(store: Store) -> None:
    tool_called(store, "t000", ToolResult.OK, 200)
    assert not Sentinel(EAGER, store, "agent").check(1.0)
    for number in range(1, 60):  # so long that nothing else is left of what is looked at
        tool_called(store, f"t{number:03}a", ToolResult.OK, 10)
        tool_called(store, f"t{number:03}b", ToolResult.TIMEOUT, 40)
        if number in (1, 59):
            assert Sentinel(EAGER, store, "agent").check(2.0), "compared with the days when it was well"
    tool_called(store, "t060", ToolResult.OK)
    assert not Sentinel(EAGER, store, "agent").check(3.0)
    assert store.observations.latest("agent", "tool_past")["search"].content == {}


@pytest.mark.slow
def answered(store: Store, version: int, answer: str, count: int, first: int) -> None:
    """Sealed trajectories of one answer each."""
    for number in range(first, first + count):
        answered_trajectory(store, f"run{number:04}", answer, version=version, at=float(number))
    store.trajectories.seal_idle_trajectories("agent", now=10_000.0, idle_seconds=1.0)


def watched(store: Store) -> Sentinel:
    """A sentinel that has read the window."""
    made = Sentinel(SentinelSettings(interval_seconds=1.0, min_coverage=0.0), store, "agent")
    for at in range(1, 12):
        made.check(float(at))
    return made


@pytest.mark.slow
def test_a_version_that_asks_in_place_of_acting_is_an_alarm_that_outlasts_a_restart(store: Store) -> None:
    answered(store, 1, "Oslo", 40, first=0)
    answered(store, 2, "Shall I look it up?", 40, first=100)
    found = {(one.check, one.subject): one.value for one in watched(store).findings}
    assert (found["questions", "1"], found["questions", "2"]) == (0.0, 1.0)
    alarm = next(one for one in store.alarms.active() if one.name == "questions:agent")
    assert alarm.reason.startswith("version 2: 100% of its answers ask a question in place of an action, 0% in older")
    answered(store, 3, "Shall I look it up?", 500, first=200)  # the window holds no good version any more
    watched(store)
    assert "questions:agent" in {one.name for one in store.alarms.active()}
    answered(store, 4, "Oslo", 40, first=900)
    watched(store)
    assert "questions:agent" not in {one.name for one in store.alarms.active()}


def test_an_alarm_of_drift_is_not_cleared_before_the_window_is_known_again(store: Store) -> None:
    for number in range(200):
        answered_trajectory(store, f"t{number:03}")
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    for check in ("length_drift", "logprob_mismatch"):
        store.alarms.raise_(f"{check}:agent", "an earlier trainer saw it")
    watching = Sentinel(SentinelSettings(interval_seconds=30.0, min_coverage=0.0), store, "agent")
    watching.check(1.0)
    assert {alarm.name for alarm in store.alarms.active()} == {"length_drift:agent"}
    for turn in range(4):
        watching.check(2.0 + turn)
    assert len(watching._behaviors) == 200, "it goes on reading at each turn"
    watching.check(31.0)
    assert store.alarms.active() == []


@pytest.mark.slow
def test_a_look_reads_a_few_trajectories_at_a_time_and_each_once(store: Store) -> None:
    for number in range(100):
        answered_trajectory(store, f"t{number:03}")
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    watching = Sentinel(EAGER, store, "agent")
    watching.check(1.0)
    assert len(watching._behaviors) == 64
    first = dict(watching._behaviors)
    watching.check(2.0)
    assert len(watching._behaviors) == 100
    assert all(watching._behaviors[name] is behavior for name, behavior in first.items())


def test_reasoning_tokens_are_the_reasonings_share_of_what_was_sampled(store: Store) -> None:
    start = call_start("call_a", "a")
    reply = {"role": "assistant", "content": f"<think>{'a' * 30}</think>{'b' * 10}"}
    store.calls.ship([ended(start, reply, ids=range(3, 13))])
    behavior = read_behavior(store.trajectories.read("a"))
    assert (behavior.sampled_tokens, behavior.reasoning_tokens, behavior.actions) == (10, 7.5, 1)
