"""Deletion: what is gone is gone from every table, what others share stays, what was trained is named."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.db import schema
from ratchet.store.db.engine import connect
from ratchet.store.deletion import reject_affected
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.operation_records import ProxyInstance
from ratchet.store.records import Feedback, JudgeRequest, Verdict
from ratchet.store.states import GroupState, TrajectoryState
from ratchet.store.store import Store
from ratchet.store.verify import verify
from tests.harness.records import (
    QUESTION,
    answered_trajectory,
    call_start,
    commit_round,
    ended,
    judged_group,
    message_count,
    tool_call,
)

SECRET = "the patient's name is Ada Lovelace"
_ANSWERS = ("deletions", "usage", "alembic_version")  # tables that may say that something was there, and how much


def _secretive(store: Store, name: str, secret: str = SECRET, at: float = 1.0) -> None:
    messages = [*QUESTION, {"role": "user", "content": secret}]
    start = call_start(f"call_{name}", name, messages, at=at, tags=("tag",))
    prompt = range(600)
    store.calls.ship([start, ended(start, tool_call(), messages=messages, prompt=prompt, context="fork")])


def _rows(store_url: str) -> dict[str, int]:
    engine = connect(store_url)
    with engine.connect() as connection:
        counts = {
            name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
            for name, table in schema.metadata.tables.items()
            if name not in _ANSWERS
        }
    engine.dispose()
    return {name: count for name, count in counts.items() if count}


def test_a_deleted_trajectory_leaves_no_row_and_others_keep_what_they_share(store: Store, store_url: str) -> None:
    answered_trajectory(store, "stays")
    before = _rows(store_url)
    content = store.trajectories.read("stays")
    _secretive(store, "goes")
    store.calls.ship([call_start("call_later", "goes", at=2.0)])
    done = store.deletions.delete(TrajectoryFilter(id="goes"), "asked")
    assert (done.trajectory_count, done.call_count, done.messages, done.unswept_messages) == (1, 2, 2, 0)
    assert _rows(store_url) == before
    assert store.trajectories.read("stays") == content
    assert [(one.reason, one.trajectory_count) for one in store.deletions.all()] == [("asked", 1)]
    store.deletions.delete(TrajectoryFilter(), "all")
    assert _rows(store_url) == {}


def test_a_prompt_stays_for_a_call_without_an_answer_and_goes_with_it(store: Store, store_url: str) -> None:
    answered_trajectory(store, "goes")
    waiting = call_start("call_waits", "waits")
    store.calls.ship([waiting])
    store.deletions.delete(TrajectoryFilter(id="goes"), "asked")
    assert store.trajectories.read("waits").messages == tuple(QUESTION)
    store.calls.ship([ended(waiting, {"role": "assistant", "content": "Oslo"})])
    store.deletions.sweep(0.0)
    assert len(store.trajectories.read("waits").messages) == 3
    assert verify(store_url).sound
    store.deletions.delete(TrajectoryFilter(id="waits"), "asked")
    assert _rows(store_url) == {}


def test_on_sqlite_the_file_holds_nothing_of_it_either(store: Store, store_url: str) -> None:
    if not store_url.startswith("sqlite"):
        pytest.skip("PostgreSQL frees rows by VACUUM")
    words = "zyxwvutsrqponmlkjihgfedcba"
    start = call_start("call_1", "goes", task=words)
    store.calls.ship([start, ended(start, tool_call(), error=words)])
    file = sa.make_url(store_url).database or ""
    store.deletions.delete(TrajectoryFilter(id="goes"), "asked")
    for name in (file, file + "-wal"):
        with open(name, "rb") as opened:
            assert words.encode() not in opened.read()


def test_successors_go_with_the_trajectory_that_they_continue(store: Store) -> None:
    answered_trajectory(store, "t1")
    store.trajectories.seal("t1", now=2.0)
    store.calls.ship([call_start("call_2", "t1", at=3.0)])
    answered_trajectory(store, "t10")
    assert store.deletions.count(TrajectoryFilter(id="t1")) == 2
    assert store.deletions.delete(TrajectoryFilter(id="t1"), "asked").trajectory_count == 2
    assert [run.id for run in store.trajectories.page()] == ["t10"]


def test_pruning_keeps_what_a_younger_successor_goes_on_from(store: Store) -> None:
    for name in ("t1", "old"):
        answered_trajectory(store, name)
    store.trajectories.seal("t1", now=2.0)
    store.calls.ship([call_start("call_2", "t1", at=50.0)])
    old = TrajectoryFilter(inactive_since=10.0)
    assert store.deletions.delete(old, "old").trajectory_count == 1
    assert {run.id for run in store.trajectories.page()} == {"t1", "t1~1"}
    assert store.deletions.delete(TrajectoryFilter(inactive_since=60.0), "old").trajectory_count == 2


def test_a_group_that_loses_a_member_before_it_is_trained_is_dropped_and_its_round_cannot_commit(store: Store) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    store.policies.register_base("agent", "base")
    held = store.rounds.start("agent", 0)
    done = store.deletions.delete(TrajectoryFilter(id="a"), "asked")
    assert (done.groups_dropped, done.policies) == (1, ())
    assert store.groups.get(group.id).state is GroupState.DROPPED
    stayed = store.trajectories.get("b")
    assert (stayed.state, stayed.drop_reason) == (TrajectoryState.DROPPED, "member_deleted")
    with pytest.raises(InvalidTransition):
        store.rounds.commit(held.id, version=1, checkpoint="/c/1", groups=[group.id], metrics={})
    with pytest.raises(InvalidTransition):
        store.groups.record_judge_failure(group.id, [], retry_at=1.0)


def test_judge_requests_and_explanations_of_the_group_are_deleted_and_other_scores_stay(store: Store) -> None:
    for name in ("a", "b"):
        answered_trajectory(store, name)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["a", "b"], now=101.0)
    request = JudgeRequest(
        id="exc_1", group_id=group.id, judge="j", url="u", request=SECRET.encode(), response=b"", status=200,
        error=None, prompt_tokens=1, completion_tokens=1, cost=None, latency=0.1, requested_at=1.0,
    )  # fmt: skip
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="j", judge_version="1", score=score, explanation=SECRET,
                judge_request_id="exc_1")
        for name, score in (("a", 0.0), ("b", 1.0))
    ]  # fmt: skip
    store.groups.record_verdicts(group.id, verdicts, [request])
    store.deletions.delete(TrajectoryFilter(id="a"), "asked")
    assert store.groups.judge_requests(group.id) == []
    (left,) = store.groups.verdict_history(group.id)
    assert (left.trajectory_id, left.score, left.explanation, left.judge_request_id) == ("b", 1.0, "", None)


def test_the_policies_that_learnt_from_it_are_named_with_those_that_went_on_from_them(store: Store) -> None:
    store.policies.register_base("agent", "base")
    for version, names in ((1, ["other"]), (2, ["mine"]), (3, ["third"])):
        group = judged_group(store, [*names, names[0] + "2"], [0.0, 1.0], task=names[0])
        commit_round(store, "agent", version, groups=[group.id])
    affected = store.deletions.versions_trained_on(TrajectoryFilter(id="mine"))
    assert [(one.version, one.trained_directly, one.adapter) for one in affected] == [
        (2, True, "/c/2"),
        (3, False, "/c/3"),
    ]
    done = store.deletions.delete(TrajectoryFilter(id="mine"), "asked")
    assert done.policies == affected == store.deletions.all()[0].policies
    assert store.deletions.delete(TrajectoryFilter(trained=False), "kept").trajectory_count == 0
    assert len(store.trajectories.page()) == 5


def _trained(store: Store, *names: str) -> None:
    """Rounds that made a version each, from the base on; the trajectory of a name trained one."""
    store.policies.register_base("agent", "base")
    for version, name in enumerate(names, 1):
        group = judged_group(store, [name, name + "2"], [0.0, 1.0], task=name)
        commit_round(store, "agent", version, groups=[group.id])


def test_versions_that_are_made_later_from_what_learnt_it_are_marked_too(store: Store) -> None:
    _trained(store, "other", "mine")
    store.policies.promote("agent", 2, {})
    assert store.deletions.versions_with_deleted_data() == ()
    store.deletions.delete(TrajectoryFilter(id="mine"), "asked")
    store.policies.register_prompt_version("agent", store.prompts.register("be kind").id, {})
    group = judged_group(store, ["later", "later2"], [0.0, 1.0], task="later")
    commit_round(store, "agent", 4, base=2, groups=[group.id])
    assert [(one.version, one.trained_directly) for one in store.deletions.versions_with_deleted_data()] == [
        (2, True),
        (3, False),
        (4, False),
    ]


def test_what_learnt_it_can_be_taken_out_of_service(store: Store) -> None:
    _trained(store, "other", "mine", "third")
    for version in (1, 2, 3):
        store.policies.promote("agent", version, {})
    store.deletions.delete(TrajectoryFilter(id="mine"), "asked")
    rejected = reject_affected(store.policies, store.deletions.versions_with_deleted_data(), by="ann")
    assert [one.version for one in rejected["agent"]] == [2, 3]
    assert store.policies.live()["agent"].version == 1
    assert store.decisions.decisions_of("agent", 3)[0].reason.endswith("deleted")
    assert reject_affected(store.policies, store.deletions.versions_with_deleted_data(), by="ann") == {}


def test_where_every_version_learnt_it_the_base_model_serves(store: Store) -> None:
    _trained(store, "mine")
    store.policies.promote("agent", 1, {})
    store.deletions.delete(TrajectoryFilter(id="mine"), "asked")
    reject_affected(store.policies, store.deletions.versions_with_deleted_data(), by="ann")
    assert store.policies.live()["agent"].version == 0


def _feedback(name: str, target: str, key: str, at: float = 5.0) -> Feedback:
    return Feedback(id=name, kind="call", target=target, source="u", given_at=at, key_id=key, comment=SECRET)


def test_feedback_that_was_never_placed_goes_with_what_it_names(store: Store) -> None:
    start = call_start("call_1", "goes", key_id="k1")
    store.calls.ship([start, ended(start, tool_call(), response_id="chatcmpl-9")])
    targets = ["call_1", "resp_1", "msg_1", "chatcmpl-9", "goes", "call_2"]
    store.calls.ship([_feedback(f"fb_{n}", target, "another") for n, target in enumerate(targets)])
    assert store.deletions.delete(TrajectoryFilter(id="goes"), "asked").feedback == 5
    assert [one.target for one in store.feedback.page()] == ["call_2"]


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        (TrajectoryFilter(key="k1"), ["fb_2", "fb_3"]),
        (TrajectoryFilter(key="k1", until=4.0), ["fb_1", "fb_2", "fb_3"]),
        (TrajectoryFilter(inactive_since=4.0, trained=False), ["fb_1", "fb_3"]),
        (TrajectoryFilter(key="k1", task="find/1"), ["fb_0", "fb_1", "fb_2", "fb_3"]),
        (TrajectoryFilter(id="t1"), ["fb_0", "fb_1", "fb_2", "fb_3"]),
    ],
    ids=str,
)
def test_feedback_that_was_never_placed_goes_by_key_and_age(
    store: Store, chosen: TrajectoryFilter, left: list[str]
) -> None:
    words = [("fb_0", "k1", 1.0), ("fb_1", "k1", 5.0), ("fb_2", "k2", 1.0), ("fb_3", "k2", 5.0)]
    store.calls.ship([_feedback(name, "call_9", key, at) for name, key, at in words])
    store.deletions.delete(chosen, "asked")
    assert sorted(one.id for one in store.feedback.page()) == left


def test_the_sweep_waits_for_a_proxy_that_may_leave_messages_out(store: Store, store_url: str) -> None:
    _secretive(store, "goes")
    store.proxy_instances.heartbeat(
        ProxyInstance(id="d", url="u", live_versions={}, pinned_trajectories={}, shipped_until=0.0, heartbeat_at=4e9)
    )
    first = store.deletions.delete(TrajectoryFilter(id="goes"), "asked", timeout_seconds=0.3)
    assert (first.trajectory_count, first.messages) == (1, 0)
    assert first.unswept_messages == 3
    store.proxy_instances.heartbeat(
        ProxyInstance(id="d", url="u", live_versions={}, pinned_trajectories={}, shipped_until=4e9, heartbeat_at=4e9)
    )
    again = store.deletions.delete(TrajectoryFilter(id="goes"), "asked")
    assert (again.trajectory_count, again.messages, again.unswept_messages) == (0, 5, 0)
    assert message_count(store) == 0
    assert verify(store_url).sound


def test_a_message_that_comes_back_is_stored_again(store: Store) -> None:
    _secretive(store, "goes")
    store.deletions.delete(TrajectoryFilter(id="goes"), "asked")
    with pytest.raises(RecordNotFound):
        store.trajectories.get("goes")
    _secretive(store, "goes")
    assert store.trajectories.read("goes").messages[2]["content"] == SECRET


def test_many_are_deleted_in_batches_and_the_newest_stay(store: Store) -> None:
    for number in range(230):
        answered_trajectory(store, f"t{number:03}", f"answer {number}", at=float(number))
    batches: list[int] = []
    done = store.deletions.delete(TrajectoryFilter(until=220.0), "old", batches.append)
    assert (done.trajectory_count, sum(batches), len(batches)) == (220, 220, 3)
    assert len(store.trajectories.page()) == 10
    assert message_count(store) == len(QUESTION) + 10


def test_what_a_round_imitated_names_its_versions_and_is_forgotten_with_the_trajectory(
    store: Store, store_url: str
) -> None:
    answered_trajectory(store, "shown")
    answered_trajectory(store, "other")
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    for number, shown in ((1, ["shown", "a", "gone already"]), (2, [])):
        held = store.rounds.start("agent", number - 1)
        groups = [group.id] if number == 2 else []
        store.rounds.commit(
            held.id, version=number, checkpoint=f"/c/{number}", groups=groups, metrics={}, demonstrations=shown
        )
    assert store.trajectories.get("shown").state is TrajectoryState.SEALED, "it may be trained besides"
    both = ("agent@1", "agent@2")
    assert store.lineage.versions_of(["shown", "a", "b", "other"]) == {"shown": both, "a": both, "b": ("agent@2",)}
    assert [one.version for one in store.deletions.versions_trained_on(TrajectoryFilter(id="shown"))] == [1, 2]
    done = store.deletions.delete(TrajectoryFilter(id="shown"), "asked")
    assert [(one.version, one.trained_directly) for one in done.policies] == [(1, True), (2, False)]
    assert store.lineage.versions_of(["shown"]) == {}
    assert _rows(store_url)["sft_trajectories"] == 1
    assert verify(store_url).sound
