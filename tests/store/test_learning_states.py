"""From sealed to trained: each trajectory once, each step allowed, each decision kept."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.operation_records import ProxyInstance
from ratchet.store.records import Verdict
from ratchet.store.states import CallState, GroupState, PolicyState, RoundState, TrajectoryState
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory, call_start, commit_round, ended, judged_group, tool_call


def test_only_idle_trajectories_are_sealed(store: Store) -> None:
    answered_trajectory(store, "old", at=1.0)
    answered_trajectory(store, "new", at=50.0)
    store.calls.ship([call_start("call_busy", "busy", at=1.0)])
    assert store.trajectories.seal_idle_trajectories("agent", now=55.0, idle_seconds=10.0) == ["old"]
    assert store.trajectories.seal_idle_trajectories("agent", now=55.0, idle_seconds=10.0) == []
    assert store.trajectories.counts()["open"] == 2


def test_a_trajectory_whose_last_call_a_machine_ended_is_cut_off(store: Store) -> None:
    """The status that went out says nothing: 200 if the head of a stream was out."""
    ends = {"ok": "answered", "bad": "refused", "left": "aborted", "gone": "failed"}
    for name, state in ends.items():
        start = call_start(f"call_{name}", name)
        store.calls.ship([ended(start, tool_call(), state=CallState(state), status=200)])
    store.calls.ship([call_start("call_unseen", "unseen")])
    store.calls.mark_interrupted(["call_unseen"])
    again = ended(call_start("call_gone2", "gone", at=2.0), tool_call())
    names = [*ends, "unseen"]
    assert store.trajectories.ended_by_failure(names) == {"gone", "unseen"}
    store.calls.ship([again])
    assert store.trajectories.ended_by_failure(names) == {"unseen"}


def test_attempts_under_way_are_the_open_ones_at_the_same_things(store: Store) -> None:
    for name, task in (("done", "t"), ("same", "t"), ("other", "u"), ("asked", None), ("asks", None)):
        store.calls.ship([call_start(f"call_{name}", name, task=task)])
    store.calls.ship([call_start("call_measured", "measured", task="t", purpose="eval")])
    for name in ("done", "asked"):
        store.trajectories.seal(name, now=5.0)
    assert [run.id for run in store.trajectories.open_attempts_like("agent", [store.trajectories.get("done")])] == [
        "same"
    ]
    assert [run.id for run in store.trajectories.open_attempts_like("agent", [store.trajectories.get("asked")])] == [
        "asks"
    ]
    assert store.trajectories.open_attempts_like("agent", []) == []


def test_aliases_share_a_store_without_meeting(store: Store) -> None:
    answered_trajectory(store, "mine")
    answered_trajectory(store, "other", alias="other")
    assert store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0) == ["mine"]
    assert [run.id for run in store.trajectories.sealed("agent")] == ["mine"]
    store.proxy_instances.heartbeat(
        ProxyInstance(
            id="d", url="u", live_versions={"other": 3}, pinned_trajectories={}, shipped_until=1.0, heartbeat_at=50.0
        )
    )
    assert store.proxy_instances.running("agent", since=0.0) == []
    assert store.proxy_instances.shipped_until("agent", now=60.0, since=0.0) == 60.0


def test_a_trajectory_joins_one_group_only(store: Store) -> None:
    for name in ("a", "b"):
        answered_trajectory(store, name)
    store.trajectories.seal_idle_trajectories("agent", now=10.0, idle_seconds=1.0)
    store.groups.create("k", "agent", ["a", "b"], now=11.0)
    with pytest.raises(InvalidTransition, match="not sealed"):
        store.groups.create("k", "agent", ["a"], now=12.0)
    assert len(store.groups.page()) == 1


def test_a_group_is_judged_only_when_every_member_has_a_score(store: Store) -> None:
    for name in ("a", "b"):
        answered_trajectory(store, name)
    store.trajectories.seal_idle_trajectories("agent", now=10.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["a", "b"], now=11.0)
    scored = Verdict(trajectory_id="a", group_id=group.id, judge="j", judge_version="1", score=1.0)
    failed = Verdict(trajectory_id="b", group_id=group.id, judge="j", judge_version="1", failure="no answer")
    with pytest.raises(InvalidTransition, match="1 of them scored"):
        store.groups.record_verdicts(group.id, [scored, failed])
    store.groups.record_judge_failure(group.id, [scored, failed], retry_at=20.0)
    assert store.groups.awaiting_verdict("agent", now=19.0) == []
    assert store.groups.awaiting_verdict("agent", now=20.0)[0].failures == 1
    assert store.groups.verdicts(["a", "b"]) == {"a": scored}


def test_a_verdict_is_a_score_or_a_failure(store: Store) -> None:
    answered_trajectory(store, "a")
    store.trajectories.seal("a", now=2.0)
    group = store.groups.create("k", "agent", ["a"], now=3.0)
    neither = Verdict(trajectory_id="a", group_id=group.id, judge="j", judge_version="1")
    with pytest.raises(sa.exc.IntegrityError, match="score_or_failure"):
        store.groups.record_judge_failure(group.id, [neither], retry_at=1.0)


def test_a_commit_consumes_its_groups_once(store: Store) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    store.policies.register_base("agent", "base")
    first = store.rounds.start("agent", 0)
    candidate = store.rounds.commit(first.id, version=1, checkpoint="/c/0001", groups=[group.id], metrics={"loss": 0.1})
    assert (candidate.state, candidate.served_name) == (PolicyState.CANDIDATE, "agent@1")
    assert store.trajectories.get("a").state is TrajectoryState.TRAINED
    assert store.trajectories.trained_in_round(first.id) == ["a", "b"]
    second = store.rounds.start("agent", 1)
    with pytest.raises(InvalidTransition, match="1 of 1 groups"):
        store.rounds.commit(second.id, version=2, checkpoint="/c/0002", groups=[group.id], metrics={})
    assert [policy.version for policy in store.policies.all("agent")] == [0, 1]
    assert store.rounds.get(second.id).state is RoundState.STARTED


def test_a_round_that_a_dead_trainer_left_is_abandoned(store: Store) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    left = store.rounds.start("agent", 0)
    store.rounds.start("agent", 0)
    assert store.rounds.get(left.id).state is RoundState.ABANDONED
    assert store.groups.get(group.id).state is GroupState.JUDGED
    assert store.rounds.newest_committed("agent") is None


def test_a_round_goes_on_from_the_newest_commit_or_not_at_all(store: Store) -> None:
    commit_round(store, "agent", 1, checkpoint="/c/0001")
    with pytest.raises(InvalidTransition, match=r"agent@1 .* not from 0"):
        store.rounds.start("agent", 0)
    overtaken = store.rounds.start("agent", 1)
    second = store.rounds.start("agent", 1)
    with pytest.raises(InvalidTransition, match="abandoned and cannot become committed"):
        store.rounds.commit(overtaken.id, version=2, checkpoint="/c/0002", groups=[], metrics={})
    store.rounds.commit(second.id, version=3, checkpoint="/c/0003", groups=[], metrics={})


def test_a_group_that_teaches_nothing_is_judged_and_dropped_at_once(store: Store) -> None:
    for name in ("a", "b"):
        answered_trajectory(store, name)
    store.trajectories.seal_idle_trajectories("agent", now=10.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["a", "b"], now=11.0)
    given = [Verdict(trajectory_id=n, group_id=group.id, judge="j", judge_version="1", score=1.0) for n in ("a", "b")]
    store.groups.record_verdicts(group.id, given, drop_reason="no_variance")
    assert store.groups.get(group.id).state is GroupState.DROPPED
    assert store.trajectories.get("a").drop_reason == "no_variance"
    assert store.groups.verdicts(["a", "b"]) == {"a": given[0], "b": given[1]}


def test_an_overtaken_candidate_is_not_promoted_by_who_has_not_noticed(store: Store) -> None:
    store.policies.register_base("agent", "base")
    for version in (1, 2):
        commit_round(store, "agent", version)
    store.policies.reject("agent", 1, {"reason": "a newer version came first"})
    store.policies.promote("agent", 2, {}, only_from=PolicyState.CANDIDATE)
    with pytest.raises(InvalidTransition, match="agent@1 is rejected by now"):
        store.policies.promote("agent", 1, {}, only_from=PolicyState.CANDIDATE)
    assert store.policies.live()["agent"].version == 2


def test_one_version_is_live_and_the_old_one_stays_addressable(store: Store) -> None:
    store.policies.register_base("agent", "base")
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    commit_round(store, "agent", 1, checkpoint="/c/0001", groups=[group.id])
    store.policies.promote("agent", 1, {"proof": 0.001})
    assert store.policies.live()["agent"].version == 1
    assert store.policies.get("agent", 0).state is PolicyState.RETIRED
    assert store.policies.get("agent", 1).evidence == {"proof": 0.001}
    with pytest.raises(InvalidTransition, match="live and cannot become live"):
        store.policies.promote("agent", 1, {})
    with pytest.raises(InvalidTransition, match="roll back to it instead"):
        store.policies.promote("agent", 0, {})
    (rejected,) = store.policies.roll_back("agent", 0, {}, by="anna", reason="rude")
    assert (rejected.version, rejected.state, store.policies.live()["agent"].version) == (1, PolicyState.REJECTED, 0)
    assert store.rounds.newest_committed("agent") is None  # training goes on from the base
    found_rounds = [
        (decision.version, decision.action, decision.decided_by, decision.reason)
        for decision in store.decisions.decisions_of("agent")
    ]
    assert found_rounds == [
        (0, "promote", "anna", "rolled back to, from 1: rude"),
        (1, "rollback", "anna", "rude"),
        (1, "promote", "proof", "proven"),
    ]
    with pytest.raises(InvalidTransition, match="nothing to roll back"):
        store.policies.roll_back("agent", 0, {}, by="anna", reason="again")
    store.policies.register_base("agent", "renamed")
    assert store.policies.get("agent", 0).served_name == "renamed"


def test_training_goes_on_on_top_of_an_unproven_version_and_nothing_is_served_by_it(store: Store) -> None:
    store.policies.register_base("agent", "base")
    commit_round(store, "agent", 1)
    left = store.policies.mark_unproven("agent", 1, {"error": 0.9}, reason="lost in rounding")
    assert (left.state, left.evidence) == (PolicyState.UNPROVEN, {"error": 0.9})
    assert [policy.version for policy in store.policies.serving()] == [0]
    (decision,) = store.decisions.decisions_of("agent", 1)
    assert (decision.action, decision.decided_by, decision.reason) == ("unproven", "proof", "lost in rounding")
    with pytest.raises(InvalidTransition, match="unproven and cannot become ramp"):
        store.policies.start_ramp("agent", 1, 0.5)
    commit_round(store, "agent", 2)
    store.policies.promote("agent", 2, {}, only_from=PolicyState.CANDIDATE)
    assert store.policies.get("agent", 1).state is PolicyState.UNPROVEN
    assert [one.version for one in store.policies.roll_back("agent", 0, {}, by="anna", reason="rude")] == [1, 2]
    assert store.rounds.newest_committed("agent") is None


def test_one_candidate_is_in_its_ramp_until_it_is_promoted_or_rejected(store: Store) -> None:
    store.policies.register_base("agent", "base")
    for version in (1, 2):
        commit_round(store, "agent", version)
    assert store.policies.start_ramp("agent", 1, 0.05, {"why": "release"}).share == 0.05
    assert store.policies.set_share("agent", 1, 0.5, by="anna", reason="more").evidence == {"why": "release"}
    assert [(p.version, p.state, p.share) for p in store.policies.serving()] == [
        (0, "live", None),
        (1, "ramp", 0.5),
    ]
    with pytest.raises(InvalidTransition, match=r"agent@1 .* ramp: promote or reject"):
        store.policies.start_ramp("agent", 2, 0.1)
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(InvalidTransition, match="between 0 and 1"):
            store.policies.set_share("agent", 1, share, by="anna", reason="odd")
    assert store.policies.promote("agent", 1, {}).share is None
    with pytest.raises(InvalidTransition, match="live and cannot become ramp"):
        store.policies.start_ramp("agent", 1, 0.1)
    store.policies.start_ramp("agent", 2, 0.1)
    assert store.policies.reject("agent", 2, {}).share is None
    assert [policy.version for policy in store.policies.serving()] == [1]


def test_what_a_rejected_version_sampled_is_dropped_and_its_groups_go_on_without_it(store: Store) -> None:
    store.policies.register_base("agent", "base")
    commit_round(store, "agent", 1)
    mixed = judged_group(store, ["a", "b"], [0.0, 1.0], task="mixed", versions=(0, 1))
    alone = judged_group(store, ["c", "d"], [0.0, 1.0], task="alone", versions=(1, 1))
    assert [found.score for found in store.groups.rewards("agent", "1", 1)] == [1.0, 0.0, 1.0]
    assert store.groups.rewards("agent", "1", 1, since=9.0) == []
    assert store.groups.drop_rejected("agent", "rolled_back") == 0
    store.policies.reject("agent", 1, {})
    assert store.groups.drop_rejected("agent", "rolled_back") == 3
    assert store.groups.drop_rejected("agent", "rolled_back") == 0
    assert store.groups.get(mixed.id).members == ("a",)
    assert (store.groups.get(alone.id).state, store.groups.get(alone.id).members) == (GroupState.DROPPED, ("c", "d"))
    store.groups.drop(mixed.id, "stale")
    assert store.trajectories.drop_counts() == {"rolled_back": 3, "stale": 1}


def test_held_out_prompts_are_the_first_of_each_task_and_of_one_answered_call(store: Store) -> None:
    for at, (name, task) in enumerate(
        [("old", "t/1"), ("new", "t/1"), ("long", "t/2"), ("kept", "t/3"), ("text", "t/4")]
    ):
        changes = {"dialect": "completions"} if name == "text" else {}
        answered_trajectory(store, name, task=task, at=float(at), **changes)
    start = call_start("call_more", "long", at=9.0)
    store.calls.ship([start, ended(start, {"role": "assistant", "content": "more"})])
    for name in ("old", "new", "long", "kept", "text"):
        store.trajectories.seal(name, now=10.0)
    store.trajectories.drop(["old", "new", "long", "text"], "held_out")
    assert store.trajectories.held_out_candidates("agent", "held_out", 9) == ["old"]


def test_a_pruned_version_serves_no_more(store: Store) -> None:
    store.policies.register_base("agent", "base")
    for version in (1, 2):
        commit_round(store, "agent", version)
        store.policies.promote("agent", version, {})
    with pytest.raises(InvalidTransition, match="in use"):
        store.policies.prune("agent", 2, now=5.0)
    assert store.policies.prune("agent", 1, now=5.0).pruned_at == 5.0
    with pytest.raises(InvalidTransition, match="was pruned"):
        store.policies.roll_back("agent", 1, {}, by="anna", reason="rude")


def test_dropped_trajectories_are_counted_by_reason(store: Store) -> None:
    group = judged_group(store, ["a", "b"], [1.0, 1.0])
    store.groups.drop(group.id, "no_variance")
    answered_trajectory(store, "c")
    store.trajectories.seal("c", now=5.0)
    store.trajectories.drop(["c"], "ungrouped")
    assert store.trajectories.drop_counts() == {"no_variance": 2, "ungrouped": 1}
    with pytest.raises(InvalidTransition):
        store.trajectories.drop(["c"], "again")


def test_trajectory_pages_go_backwards_without_gaps(store: Store) -> None:
    for number in range(5):
        answered_trajectory(store, f"t{number}", at=float(number))
    first = store.trajectories.page(limit=3)
    second = store.trajectories.page(limit=3, before=first[-1].id)
    assert [run.id for run in [*first, *second]] == ["t4", "t3", "t2", "t1", "t0"]


def test_a_lease_has_one_owner_until_it_expires(store: Store) -> None:
    assert store.leases.acquire("trainer", "one", seconds=60.0)
    assert not store.leases.acquire("trainer", "two", seconds=60.0)
    assert store.leases.acquire("trainer", "one", seconds=0.01)
    time.sleep(0.02)
    assert store.leases.acquire("trainer", "two", seconds=60.0)
    store.leases.release("trainer", "one")
    assert not store.leases.acquire("trainer", "one", seconds=1.0)


def test_an_alarm_counts_up_and_stays_readable_after_it_is_cleared(store: Store) -> None:
    store.alarms.raise_("no_signal", "first")
    store.alarms.raise_("no_signal", "second")
    (active,) = store.alarms.active()
    assert (active.reason, active.count) == ("second", 2)
    store.alarms.clear("no_signal")
    assert store.alarms.active() == []
    assert store.alarms.all()[0].cleared_at is not None


def test_proxies_list_their_versions_until_they_stop(store: Store) -> None:
    store.proxy_instances.heartbeat(
        ProxyInstance(
            id="d1",
            url="http://x",
            live_versions={"agent": 1},
            pinned_trajectories={"agent@0": 2},
            shipped_until=1.0,
            heartbeat_at=10.0,
        )
    )
    store.proxy_instances.heartbeat(
        ProxyInstance(
            id="d1",
            url="http://x",
            live_versions={"agent": 2},
            pinned_trajectories={},
            shipped_until=1.0,
            heartbeat_at=11.0,
        )
    )
    (instance,) = store.proxy_instances.running("agent", since=10.5)
    assert (instance.live_versions, instance.pinned_trajectories) == ({"agent": 2}, {})
    store.proxy_instances.remove("d1")
    assert store.proxy_instances.running("agent", since=0.0) == []


def test_unknown_records_are_named(store: Store) -> None:
    for ask in (store.trajectories.get, store.groups.get, store.rounds.get):
        with pytest.raises(RecordNotFound, match="nothing_1"):
            ask("nothing_1")
    with pytest.raises(RecordNotFound, match="agent@3"):
        store.policies.get("agent", 3)
