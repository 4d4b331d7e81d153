"""What releases are decided on, and what is reported: outcomes in order, status, versions that are unproven."""

from __future__ import annotations

import time
from typing import Any

from ratchet.store.records import ReleaseOutcome, Verdict, VersionDraw
from ratchet.store.reports.version_reports import describe_release, read_release, read_unproven
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory, call_start, commit_round, ended, tool_call

DRAW = VersionDraw(shares={0: 0.55, 1: 0.45})


def judged(store: Store, names: list[str], scores: list[float], judge: str = "1") -> None:
    """Seal, group and judge recorded trajectories."""
    for name in names:
        store.trajectories.seal(name, now=50.0)
    group = store.groups.create("task:t", "agent", names, now=51.0)
    given = [Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version=judge, score=score)
             for name, score in zip(names, scores, strict=True)]  # fmt: skip
    store.groups.record_verdicts(group.id, given)


def outcomes(store: Store, since: float = 0.0, after: str = "", **more: Any) -> list[ReleaseOutcome]:
    return store.releases.outcomes(
        "agent", "1", since, after=after, deadline_seconds=more.pop("deadline", 1e12), **more
    )


def named(found: list[ReleaseOutcome]) -> list[str]:
    return [one.trajectory_id for one in found]


def test_an_outcome_knows_the_draw_the_scores_of_its_group_and_its_failed_calls(store: Store) -> None:
    drawn = VersionDraw(shares={0: 0.55, 1: 0.45}, unit="u1")
    answered_trajectory(store, "a", at=1.0, version=1, task="t/1", draw=drawn)
    failed = call_start("call_a2", "a", at=2.0, version=1, task="t/1")
    store.calls.ship([ended(failed, tool_call(), state=CallState.FAILED, status=500)])
    answered_trajectory(store, "b", at=3.0, task="t/1")  # its version was named: it counts for the group only
    judged(store, ["a", "b"], [0.25, 1.0])
    (found,) = outcomes(store)
    assert found == ReleaseOutcome(
        trajectory_id="a", started_at=1.0, seconds=1.5, version=1, shares={0: 0.55, 1: 0.45}, unit="u1",
        score=0.25, group_scores=(1.0,), finished=True, calls=2, failed_calls=1,
    )  # fmt: skip
    assert store.trajectories.get("a").draw == drawn
    assert store.trajectories.get("b").draw is None


def test_outcomes_wait_for_earlier_ones_until_these_are_settled_or_overdue(store: Store) -> None:
    for at, name in enumerate("abcd"):
        answered_trajectory(store, name, at=float(at), version=at % 2, draw=DRAW)
    judged(store, ["a", "c"], [0.0, 1.0])
    assert named(outcomes(store)) == ["a"], "b is open"
    judged(store, ["b"], [1.0], judge="an older one")
    assert named(outcomes(store)) == ["a"], "b has no score of this judge"
    overdue = time.time() - 2.5
    assert [(one.trajectory_id, one.score) for one in outcomes(store, deadline=overdue)] == [
        ("a", 0.0), ("b", None), ("c", 1.0),
    ]  # fmt: skip
    assert named(outcomes(store, since=0.0, after="a", deadline=overdue)) == ["b", "c"]
    assert named(outcomes(store, since=2.0, after="c", deadline=0.0)) == ["d"]
    assert named(outcomes(store, deadline=0.0, until=3.0)) == ["a", "b", "c"]
    assert named(outcomes(store, deadline=0.0, limit=2)) == ["a", "b"]
    assert [one.finished for one in outcomes(store, deadline=0.0)] == [True, True, True, False]


def test_an_open_trajectory_is_overdue_sooner_than_one_that_waits_for_its_judge(store: Store) -> None:
    for at, name in enumerate("abc"):
        answered_trajectory(store, name, at=float(at), draw=DRAW)
    store.trajectories.seal("b", now=50.0)
    found = outcomes(store, open_seconds=60.0, deadline=600.0, until=100.0)
    assert [(one.trajectory_id, one.seconds, one.finished) for one in found] == [("a", None, False)], "b may be judged"
    found = outcomes(store, open_seconds=60.0, deadline=600.0, until=601.0)
    assert [(one.trajectory_id, one.seconds) for one in found] == [("a", None), ("b", 0.5), ("c", None)]
    assert named(outcomes(store, open_seconds=600.0, deadline=60.0, until=61.0)) == ["a", "b"]


def test_dropped_trajectories_are_outcomes_unless_their_drop_has_nothing_to_do_with_versions(store: Store) -> None:
    reasons = ["held_out", "cut_off", "ungrouped", "rolled_back"]
    for at, reason in enumerate(reasons):
        answered_trajectory(store, reason, at=float(at), draw=DRAW)
        store.trajectories.seal(reason, now=50.0)
        store.trajectories.drop([reason], reason)
    uncounted = VersionDraw(shares={0: 1.0}, counted=False)
    answered_trajectory(store, "rollout", at=9.0, draw=uncounted)
    assert [(one.trajectory_id, one.score, one.finished) for one in outcomes(store)] == [
        ("cut_off", None, False), ("ungrouped", None, True),
    ]  # fmt: skip
    assert store.trajectories.get("rollout").draw == uncounted


def test_many_outcomes_come_in_order_and_go_on_from_the_last(store: Store) -> None:
    names = [f"t{number:03}" for number in range(250)]
    store.calls.ship(
        [ended(call_start(f"call_{name}", name, at=float(number // 2), draw=DRAW), tool_call())
         for number, name in enumerate(names)]
    )  # fmt: skip
    judged(store, names, [1.0] * 250)
    found = outcomes(store, limit=120)
    assert named(found) == names[:120]
    rest = outcomes(store, since=found[-1].started_at, after=found[-1].trajectory_id)
    assert named(rest) == names[120:]
    assert outcomes(store, since=rest[-1].started_at, after=rest[-1].trajectory_id) == []


def test_the_evidence_of_a_version_is_replaced_and_kept(store: Store) -> None:
    store.policies.register_base("agent", "base")
    store.releases.record_evidence("agent", 0, {"harm": 1.0})
    store.releases.record_evidence("agent", 0, {"harm": 2.5})
    (found,) = store.releases.evidence("agent")
    assert (found.version, found.evidence) == (0, {"harm": 2.5})
    assert store.releases.evidence("other") == []


FIGURES: dict[str, Any] = {
    "harm": 0.5, "enough": 1000.0, "counted": 12, "ramp_length": 256, "per_day": 300.0, "status": "the ramp goes on",
    "live_minus_anchor": {"value": 0.02, "low": -0.1, "high": 0.14, "count": 400},
    "detectable": {"day": 1.2, "week": 0.15, "month": 0.075}, "traffic_too_small": False,
    "deserved_round_size": 512, "round_size": 128,
}  # fmt: skip


def versions(store: Store, count: int) -> None:
    store.policies.register_base("agent", "base")
    for version in range(1, count + 1):
        commit_round(store, "agent", version)


def described(store: Store, **more: bool) -> list[str]:
    found = read_release(store, "agent")
    assert found is not None
    return describe_release(found, **more)


def test_the_three_versions_that_serve_are_described_with_shares_evidence_and_what_the_traffic_can_show(
    store: Store,
) -> None:
    assert read_release(store, "agent") is None
    versions(store, 2)
    assert described(store) == ["serving       @0 live 100%; the anchor is @0"]
    store.policies.promote("agent", 1, {}, holdback=0.1)
    store.policies.start_ramp("agent", 2, 0.45)
    store.releases.record_evidence("agent", 2, FIGURES)
    assert described(store) == [
        "serving       @0 holdback 10%, @1 live 45%, @2 ramp 45%; the anchor is @0",
        "evidence      @2: 12 of 256 trajectories of its ramp are counted; evidence of harm 0.5, of 1000 that roll it "
        "back",
        "release       the ramp goes on",
        "live - anchor +0.020 (-0.100 to +0.140, at all times 95%), 400 trajectories since @0 became the anchor",
        "finds         a loss of 0.15 in a week, 0.07 in a month, in the median, at 300 scored trajectories a day",
        "round size    128 trajectories; about 512 would suit this traffic (trainer.groups_per_round, and "
        "round_wait_seconds so that a round can fill)",
    ]
    for size, line in (
        (300, "300 trajectories (trainer.groups_per_round); about 512 would suit this traffic"),
        (2048, "2048 trajectories; about 512 would suit this traffic (trainer.groups_per_round)"),
    ):
        store.releases.record_evidence("agent", 2, FIGURES | {"round_size": size})
        assert described(store)[-1] == f"round size    {line}"
    store.releases.record_evidence("agent", 2, FIGURES | {"traffic_too_small": True, "detectable": {"month": 1.5}})
    lines = described(store)
    assert any(line.startswith("TRAFFIC       is too small") for line in lines)
    assert any(line.startswith("finds         no loss below 1.00 in a month") for line in lines)
    assert described(store, unprotected=True)[-1].startswith("UNPROTECTED")


def test_a_pin_is_described_with_its_author_and_reason(store: Store) -> None:
    versions(store, 1)
    store.policies.pin("agent", 0, by="anna", reason="a fair")
    assert described(store)[1] == "PINNED        by anna: a fair; `ratchet policies unpin agent` ends it"
    store.policies.unpin("agent", by="anna", reason="over")
    assert len(described(store)) == 1


def commit(store: Store, version: int, reason: str) -> None:
    commit_round(store, "mail", version, checkpoint=f"c/{version}")
    store.policies.mark_unproven("mail", version, {}, reason=reason)


def test_the_newest_reason_and_the_remedies_are_shown_until_a_version_is_released(store: Store) -> None:
    store.policies.register_base("mail", "base")
    assert read_unproven(store, "mail") is None
    commit(store, 1, "lost in rounding")
    only = read_unproven(store, "mail")
    assert only is not None
    assert only.describe().startswith("1 version unproven: lost in rounding; mail@1 ")
    commit(store, 2, "replica 2 serves another adapter")
    found = read_unproven(store, "mail")
    assert found is not None
    text = found.describe()
    assert text.startswith("2 versions unproven: replica 2 serves another adapter; @1 to mail@2 ")
    assert "trainer.max_staleness" in text
    for remedy in ("vllm.dtype, learner.dtype", "restart a replica", "policies promote mail@2", "rollback mail@0"):
        assert remedy in text
    store.policies.promote("mail", 2, {})
    assert read_unproven(store, "mail") is None
