"""Judges are suspects: a failure is a state, a flat group is loud."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from ratchet.store.records import Group, Verdict
from ratchet.store.states import GroupState
from ratchet.store.store import Store
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judge_runner import JudgeRunner, SecondJudge, zero_variance_groups
from ratchet.trainer.judges.judgement import GroupJudgement
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.records import answered_trajectory
from tests.harness.trainer import judge_samples

HERE = "tests.harness.trainer.judge_samples"


def ready_group(store: Store, answers: dict[str, Any]) -> Group:
    """A ready group whose members said the keys of `answers`; the scripted judge gives the values."""
    judge_samples.by_answer.clear()
    judge_samples.by_answer.update(answers)
    start = len(store.trajectories.page())
    names = [f"t{start + number}" for number in range(len(answers))]
    for name, answer in zip(names, answers, strict=True):
        answered_trajectory(store, name, answer)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    return store.groups.create("k", "agent", names, now=101.0)


def keeper(store: Store, **changes: Any) -> JudgeRunner:
    settings: dict[str, Any] = {"attempts": 2, "retry_seconds": 5.0, "alarm_after": 2} | changes
    return JudgeRunner(store, FunctionJudge(f"{HERE}:scripted"), **settings)


def score(store: Store, keep: JudgeRunner, group: Group, now: float = 102.0) -> Group:
    keep.submit([store.groups.get(group.id)], store.trajectories.read)
    assert keep.collect_results(now, timeout=60.0) == 1
    return store.groups.get(group.id)


def test_a_function_gets_only_what_it_names(store: Store) -> None:
    group = ready_group(store, {"Oslo": 0, "Rome!": 0})
    members = [store.trajectories.read(name) for name in group.members]
    verdicts = FunctionJudge(f"{HERE}:length").judge(group.id, members).verdicts
    assert [verdict.score for verdict in verdicts] == [4.0, 5.0]
    assert len(verdicts[0].judge_version) == 16


def test_components_and_explanation_are_kept(store: Store) -> None:
    rich = {"score": 0.5, "components": {"format": 1}, "explanation": "half right"}
    group = score(store, keeper(store), ready_group(store, {"a": rich, "b": True}))
    verdict = store.groups.verdicts(group.members)[group.members[0]]
    assert (verdict.score, verdict.components, verdict.explanation) == (0.5, {"format": 1.0}, "half right")
    assert group.state is GroupState.JUDGED


@pytest.mark.parametrize(
    "bad",
    [
        ValueError("no idea"),
        None,
        float("nan"),
        "high",
        10**400,
        1e300,
        -1.5e9,
        {"components": {}},
        {"score": 1, "components": {"x": "y"}},
        {"score": 1, "components": ["x"]},
        {"score": 1, "components": {"x": 1e300}},
        {"score": 1, "components": dict.fromkeys(map(str, range(1001)), 0.5)},
        {"score": 1, "components": {"x" * 201: 0.5}},
    ],
    ids=[
        "exception",
        "nothing",
        "nan",
        "text",
        "huge",
        "too large",
        "too low",
        "no score",
        "bad component",
        "components list",
        "component too large",
        "too many components",
        "long name",
    ],
)
def test_a_judge_failure_is_never_a_score(store: Store, bad: Any) -> None:
    group = score(store, keeper(store), ready_group(store, {"a": 1.0, "b": bad}))
    assert (group.state, group.failures) == (GroupState.READY, 1)
    assert list(store.groups.verdicts(group.members)) == [group.members[0]]


@pytest.mark.parametrize("number", [Decimal("0.5"), Fraction(1, 2), numpy.float32(0.5), torch.tensor([0.5])])
def test_a_number_of_any_library_is_a_score(store: Store, number: Any) -> None:
    group = score(
        store, keeper(store), ready_group(store, {"a": {"score": number, "components": {"x": number}}, "b": 1})
    )
    verdict = store.groups.verdicts(group.members)[group.members[0]]
    assert (verdict.score, verdict.components) == (0.5, {"x": 0.5})


def test_a_long_explanation_and_a_long_failure_are_cut_with_a_note(store: Store) -> None:
    long = {"score": 1.0, "explanation": "e" * 3_000_000}
    group = score(store, keeper(store), ready_group(store, {"a": long, "b": ValueError("f" * 5000)}))
    explained, failed = store.groups.verdict_history(group.id)
    assert explained.explanation.endswith("e [cut: 3,000,000 characters]")
    assert len(explained.explanation) == 20_000
    assert (failed.failure or "").endswith("f [cut: 5,012 characters]")
    assert len(failed.failure or "") == 2000


def test_the_alarm_has_the_beginning_of_a_long_failure(store: Store) -> None:
    group = ready_group(store, {"a": ValueError("f" * 5000), "b": 1.0})
    keep = keeper(store)
    score(store, keep, group)
    score(store, keep, group, now=110.0)
    (alarm,) = store.alarms.active()
    assert "e.g. ValueError: fff" in alarm.reason
    assert len(alarm.reason) < 900


def test_a_plug_ins_verdict_outside_the_limits_is_a_failure(store: Store) -> None:
    group = ready_group(store, {"a": 0, "b": 0})
    given = Verdict(trajectory_id=group.members[0], group_id=group.id, judge="other", judge_version="1", score=1e300)
    (verdict,) = GroupJudgement((given,)).verdicts
    assert verdict.score is None
    assert re.search(r"1e\+300.* -1e\+09 to 1e\+09", str(verdict.failure))


@pytest.mark.slow
def test_a_group_that_cannot_be_judged_is_dropped_loudly_not_scored_zero(store: Store) -> None:
    group = ready_group(store, {"a": ValueError("no idea"), "b": 1.0})
    keep = keeper(store)
    score(store, keep, group)
    group = score(store, keep, group, now=110.0)
    assert (group.state, group.drop_reason) == (GroupState.DROPPED, "judge_failed")
    (alarm,) = store.alarms.active()
    assert "no idea" in alarm.reason
    assert "dropped, not scored 0" in alarm.reason


def test_a_member_that_the_judge_cannot_score_is_put_aside_and_the_others_are_compared(store: Store) -> None:
    group = ready_group(store, {"a": ValueError("no idea"), "b": 1.0, "c": 0.0})
    keep = keeper(store)
    assert score(store, keep, group).state is GroupState.READY
    judged = score(store, keep, group, now=110.0)
    assert (judged.state, judged.members) == (GroupState.JUDGED, group.members[1:])
    assert store.trajectories.get(group.members[0]).drop_reason == "judge_failed"
    assert [verdict.failure is None for verdict in store.groups.verdict_history(group.id)] == [False, True, True] * 2
    (alarm,) = store.alarms.active()
    assert "1 of 3 members, e.g. ValueError: no idea); they were dropped, not scored 0, and the other 2" in alarm.reason


def test_a_judge_that_is_away_for_minutes_loses_nothing_and_is_an_alarm_meanwhile(store: Store) -> None:
    group = ready_group(store, {"a": ConnectionError("away"), "b": 1.0})
    keep, now = keeper(store, attempts=5), 100.0
    for pause in (5.0, 20.0, 80.0, 320.0):
        group = score(store, keep, group, now=now)
        assert store.groups.awaiting_verdict("agent", now + pause - 1.0) == []
        now += pause
        assert store.groups.awaiting_verdict("agent", now) == [group]
        assert bool(store.alarms.active()) is (group.failures > 1)
    assert "is judged again in 320 s" in store.alarms.active()[0].reason


def test_trajectories_wait_for_a_judge_model_that_is_away_and_the_second_judge_is_called_once(store: Store) -> None:
    group = ready_group(store, {"Oslo": 0.0, "Rome": 1.0})
    judged: list[str] = []

    def also(response: str) -> float:
        judged.append(response)
        return float(len(judged))

    with ScriptedModel() as model:
        judge = make_judge(read_spec({"kind": "ruler", "base_url": model.url, "model": "big"}), {})
        second = SecondJudge(FunctionJudge(also), 1.0, store, "agent", "1")
        keep = JudgeRunner(store, judge, attempts=2, retry_seconds=5.0, alarm_after=2, second=second)
        for now, pause in ((100.0, 5.0), (105.0, 5.0), (130.0, 30.0), (400.0, 60.0), (4000.0, 60.0)):
            model.answers = [(401, "who are you")]
            group = score(store, keep, group, now=now)
            assert (group.state, group.failures) == (GroupState.READY, 0)
            assert store.groups.awaiting_verdict("agent", now + pause - 1.0) == []
            assert store.groups.awaiting_verdict("agent", now + pause) == [group]
        (alarm,) = store.alarms.active()
        assert "in RATCHET_JUDGE_API_KEY" in alarm.reason
        assert "trajectories wait" in alarm.reason
        assert store.groups.judge_requests(group.id) == [], "a long outage fills no store"
        assert store.groups.verdict_history(group.id) == []
        model.answers = [says({"scores": [{"trajectory_id": str(n), "score": n / 2} for n in (1, 2)]})]
        assert score(store, keep, group, now=5000.0).state is GroupState.JUDGED
        assert store.alarms.active() == []
        keep.close()
    assert len(judged) <= 2


def test_a_judge_that_does_not_return_is_an_alarm_until_it_does(store: Store) -> None:
    keep = keeper(store)
    keep.hang_seconds = 0.1
    group = ready_group(store, {"a": 0.0, "b": 1.0})
    judge_samples.pause.clear()
    try:
        keep.submit([group], store.trajectories.read)
        assert keep.collect_results(102.0, timeout=0.2) == 0
        assert keep.collect_results(102.0, timeout=0.2) == 0
        (alarm,) = store.alarms.active()
        assert alarm.name == "judge_hangs:agent"
        assert alarm.reason.startswith(f"judge {HERE}:scripted has been judging group {group.id} for over 0.1 s")
        keep.collect_results(103.0, timeout=0.0)
        assert store.alarms.active()[0].count == 1, "it is raised once"
    finally:
        judge_samples.pause.set()
    assert keep.collect_results(104.0, timeout=60.0) == 1
    assert store.groups.get(group.id).state is GroupState.JUDGED
    keep.collect_results(105.0, timeout=0.0)
    assert store.alarms.active() == []


def test_the_alarm_of_a_judge_that_hung_before_a_restart_ends_with_the_next_scores(store: Store) -> None:
    store.alarms.raise_("judge_hangs:agent", "an earlier trainer's")
    score(store, keeper(store), ready_group(store, {"a": 0.0, "b": 1.0}))
    assert store.alarms.active() == []


def test_groups_without_variance_are_an_alarm_that_names_judge_score_and_group(store: Store) -> None:
    keep = keeper(store)
    first = score(store, keep, ready_group(store, {"a": 0.0, "b": 0.0}))
    assert (first.drop_reason, store.alarms.active()) == ("no_variance", [])
    second = score(store, keep, ready_group(store, {"c": 0.0, "d": 0.0}))
    (alarm,) = store.alarms.active()
    assert alarm.reason.startswith(f"last 2 groups: no variance, judge {HERE}:scripted gave 0 to all 4 trajectories")
    assert first.id in alarm.reason
    assert second.id in alarm.reason
    score(store, keep, ready_group(store, {"e": 0.0, "f": 1.0}))
    assert store.alarms.active() == []


@pytest.mark.parametrize(
    ("entry_point", "says"),
    [
        ("no.such.module:judge", "no.such"),
        (f"{HERE}:missing", "missing"),
        ("tests.harness.trainer.broken_judge:judge", "ZeroDivisionError"),
        (f"{HERE}:not_a_function", "not callable"),
        (f"{HERE}:needs_more", "can use trajectory, response, task"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused_at_start(entry_point: str, says: str) -> None:
    with pytest.raises(JudgeError, match=says):
        FunctionJudge(entry_point)


def test_groups_in_a_row_without_variance_are_counted_over_a_restart(store: Store) -> None:
    first = keeper(store, alarm_after=3)
    score(store, first, ready_group(store, {"a": 0.0, "b": 1.0}))
    for _ in range(2):
        score(store, first, ready_group(store, {"c": 0.5, "d": 0.5}))
    first.close()
    assert store.alarms.active() == []
    later = keeper(store, alarm_after=3, zero_variance=zero_variance_groups(store, "agent"))
    score(store, later, ready_group(store, {"e": 0.5, "f": 0.5}))
    (alarm,) = store.alarms.active()
    assert alarm.reason.startswith("last 3 groups: no variance")
    assert "gave 0.5 to all 6 trajectories" in alarm.reason
    score(store, later, ready_group(store, {"g": 0.0, "h": 1.0}))
    assert zero_variance_groups(store, "agent") == []


@pytest.mark.parametrize("function", ["needs_another_caller", "awaits_another_caller"])
def test_a_function_judges_several_groups_concurrently_if_configured(store: Store, function: str) -> None:
    groups = [ready_group(store, {f"group {number}": None}) for number in range(2)]
    judge = make_judge(read_spec({"kind": "function", "function": f"{HERE}:{function}", "concurrency": 2}), {})
    keep = JudgeRunner(store, judge, attempts=1, retry_seconds=5.0, alarm_after=2)
    keep.max_read_seconds = 60.0  # else a busy machine leaves the second group for the next call
    keep.submit(groups, store.trajectories.read)
    waited = 0
    while waited < 2:
        waited += keep.collect_results(102.0, 30.0)
    keep.close()
    found = store.groups.verdicts([name for group in groups for name in group.members])
    assert [verdict.score for verdict in found.values()] == [7.0, 7.0]
