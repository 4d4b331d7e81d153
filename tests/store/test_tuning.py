"""Prompts, tasks, tunings and rollouts: known by content or by id, ended once, and forgotten with their trajectory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.db import schema
from ratchet.store.db.engine import connect, write
from ratchet.store.errors import InvalidRecord, InvalidTransition, RecordNotFound
from ratchet.store.operation_records import Rollout, TaskRow
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState, PromptMode, RolloutState, TuningState
from ratchet.store.store import Store
from ratchet.store.verify import verify
from tests.harness.records import answered_trajectory, call_start, commit_round, end_rollout, judged_group


def _planned(store: Store, *names: str, **changes: Any) -> str:
    """Plan rollouts of one tuning; return its id."""
    tuning = store.tunings.begin("prompt", "agent", {"budget": 3})
    values: dict[str, Any] = {"task_id": "t", "split": "train", "attempt": 0, "candidate": "seed", "planned_at": 1.0}
    store.rollouts.plan([Rollout(id=name, tuning_id=tuning.id, **(values | changes)) for name in names])
    return tuning.id


def test_a_prompt_is_known_by_its_content(store: Store) -> None:
    one = store.prompts.register("Be brief.", origin="gepa")
    assert one.id.startswith("prm_")
    assert len(one.id) == 20
    assert store.prompts.register("Be brief.", origin="somebody else") == one == store.prompts.get(one.id)
    appended = store.prompts.register("Be brief.", mode="append")
    assert appended.mode is PromptMode.APPEND
    families = store.prompts.register("", mode="append", families={"task:math": "Check the units."})
    assert len({one.id, appended.id, families.id}) == 3
    assert (families.text_for("task:math"), families.text_for("task:mail"), families.text_for(None)) == (
        "Check the units.", "", "",
    )  # fmt: skip
    with pytest.raises(RecordNotFound):
        store.prompts.get("prm_0")


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [(" ", "replace", "empty"), ("a\0b", "replace", "NUL"), ("\ud800", "replace", "Unicode"),
     ("x" * 200_001, "append", "shorten"), ("x", "prepend", "replace or append")],
)  # fmt: skip
def test_a_text_that_cannot_be_served_is_refused_with_the_reason(
    store: Store, text: str, mode: str, reason: str
) -> None:
    with pytest.raises(InvalidRecord, match=reason):
        store.prompts.register(text, mode)


def test_a_task_row_is_found_by_its_id_and_stays_as_it_was(store: Store) -> None:
    rows = [
        TaskRow(id=f"{n:016x}", task_set="math", split="train", content={"n": n, "text": "a\0ü"}) for n in range(1200)
    ]
    store.tasks.register(iter(rows))
    store.tasks.register([TaskRow(id=rows[7].id, task_set="other", split="test", content={})])
    assert store.tasks.get(rows[7].id) == rows[7]
    assert store.tasks.get("nothing") is None
    with pytest.raises(InvalidRecord, match="task id"):
        store.tasks.register([TaskRow(id="", task_set="s", split="train", content={})])


def test_a_tuning_goes_on_where_it_was_and_ends_once(store: Store) -> None:
    started = store.tunings.begin("prompt", "agent", {"budget": 3})
    store.tunings.update(started.id, {"calls": 1})
    stopped = store.tunings.end(started.id, "stopped")
    assert (stopped.state, stopped.result) == (TuningState.STOPPED, {"calls": 1})
    with pytest.raises(InvalidTransition, match="stopped by now"):
        store.tunings.update(started.id, {"calls": 2})
    assert store.tunings.resume(started.id).ended_at is None
    done = store.tunings.end(started.id, "done", {"gain": 0.5})
    assert (done.state, done.result, done.error) == (TuningState.DONE, {"gain": 0.5}, None)
    with pytest.raises(InvalidTransition, match="done"):
        store.tunings.end(done.id, "failed")
    with pytest.raises(InvalidTransition, match="done"):
        store.tunings.resume(done.id)
    other = store.tunings.begin("eval", "agent", {})
    assert store.tunings.end(other.id, "failed", error="no\0judge").error == "no\ufffdjudge"
    assert [one.id for one in store.tunings.page()] == [other.id, done.id]
    assert store.tunings.page(kind="prompt") == [done]
    assert store.tunings.page(before=other.id) == [done]
    with pytest.raises(RecordNotFound, match="tune runs"):
        store.tunings.get("tun_0")


def test_a_rollout_ends_once_and_a_failed_one_stays_with_its_exception(store: Store, store_url: str) -> None:
    prompt = store.prompts.register("Be brief.")
    tuning = _planned(store, "roll_1", "roll_2", prompt_id=prompt.id, scenario={"user": "mean"}, purpose="eval")
    assert store.rollouts.get("roll_1").state is RolloutState.PLANNED
    ended = end_rollout(
        store, "roll_1", started_at=2.0, ended_at=3.0, response='"a\0b"', metrics={"turns": 2.0}, prompt_tokens=7
    )
    assert (ended.state, ended.response, ended.metrics, ended.prompt_tokens) == (
        RolloutState.ENDED, '"a\ufffdb"', {"turns": 2.0}, 7,
    )  # fmt: skip
    failed = end_rollout(store, "roll_2", failure="TimeoutError: 60 s", started_at=2.0, ended_at=4.0)
    assert (failed.state, failed.failure, failed.scenario) == (
        RolloutState.FAILED, "TimeoutError: 60 s", {"user": "mean"},
    )  # fmt: skip
    with pytest.raises(InvalidTransition, match="roll_2 is unknown, or was ended"):
        end_rollout(store, "roll_2", started_at=2.0, ended_at=5.0)
    store.rollouts.plan([ended])
    assert store.rollouts.of_tuning(tuning, responses=True) == [ended, failed]
    assert store.rollouts.of_tuning(tuning, "another") == []
    with pytest.raises(RecordNotFound):
        end_rollout(store, "roll_9", failure="x")
    assert verify(store_url).sound


def test_a_judges_failure_is_never_a_number_and_its_later_word_counts(store: Store) -> None:
    _planned(store, "roll_1")
    unjudged = store.rollouts.score("roll_1", None, "rule", "it timed out")
    assert (unjudged.score, unjudged.judge_failure) == (None, "it timed out")
    judged = store.rollouts.score("roll_1", 0.5, "rule")
    assert (judged.score, judged.judge, judged.judge_failure) == (0.5, "rule", None)
    for score, failure in ((0.5, "both"), (None, None)):
        with pytest.raises(InvalidTransition, match="either a score or a failure"):
            store.rollouts.score("roll_1", score, "rule", failure)


def test_a_rollout_between_two_calls_is_not_taken_for_idle(store: Store) -> None:
    run = _planned(store, "roll_1", "roll_2", "roll_3")
    for name in ("roll_1", "roll_2", "ordinary"):
        answered_trajectory(store, name)
    end_rollout(store, "roll_2", started_at=1.0, ended_at=2.0)
    last = max(store.trajectories.last_active(["roll_1", "roll_2", "ordinary"]).values())
    assert sorted(store.trajectories.seal_idle_trajectories("agent", last + 60.0, 1.5)) == ["ordinary", "roll_2"]
    assert store.trajectories.seal_idle_trajectories("agent", last + 3601.0, 1.5) == [
        "roll_1"
    ]  # nobody works for so long
    answered_trajectory(store, "roll_3")
    assert store.trajectories.seal_idle_trajectories("agent", last + 60.0, 1.5) == []
    store.tunings.end(run, "stopped")
    assert store.trajectories.seal_idle_trajectories("agent", last + 60.0, 1.5) == ["roll_3"]


def test_what_a_killed_run_planned_is_abandoned_when_it_goes_on(store: Store) -> None:
    run = _planned(store, "roll_1", "roll_2")
    end_rollout(store, "roll_2", started_at=1.0, ended_at=2.0)
    other = _planned(store, "roll_3")
    answered_trajectory(store, "roll_1")
    store.tunings.resume(run)
    assert {one.id: str(one.state) for one in store.rollouts.of_tuning(run)} == {
        "roll_1": "abandoned",
        "roll_2": "ended",
    }
    assert [one.counts for one in store.rollouts.of_tuning(run)] == [False, True]
    assert [one.state for one in store.rollouts.of_tuning(other)] == [RolloutState.PLANNED]
    last = store.trajectories.last_active(["roll_1"])["roll_1"]
    # Its agent may call yet: it is sealed for being still, not for being over, so that a late call stays in it.
    assert store.trajectories.seal_rollouts("agent", last + 60.0) == []
    assert store.trajectories.seal_idle_trajectories("agent", last + 60.0, 1.5) == ["roll_1"]
    with pytest.raises(InvalidTransition, match="roll_1 is unknown, or was ended"):
        end_rollout(store, "roll_1", started_at=1.0, ended_at=2.0)


def test_a_run_that_ends_leaves_nothing_planned(store: Store) -> None:
    run = _planned(store, "roll_1")
    store.tunings.end(run, "stopped")
    assert store.rollouts.get("roll_1").state is RolloutState.ABANDONED


def test_late_calls_of_an_abandoned_rollout_are_known_by_its_name(store: Store) -> None:
    run = _planned(store, "roll_1", "roll_2")
    end_rollout(store, "roll_2", started_at=1.0, ended_at=2.0)
    store.tunings.resume(run)
    names = ["roll_1", "roll_1~1", "roll_1~2", "roll_2", "roll_2~1", "t1"]
    assert store.rollouts.abandoned(names) == {"roll_1", "roll_1~1", "roll_1~2"}
    assert store.rollouts.abandoned([]) == set()


def test_a_doctors_run_is_listed_only_by_its_kind(store: Store) -> None:
    eval_, look = (store.tunings.begin(kind, "agent", {}).id for kind in ("eval", "doctor"))
    assert [one.id for one in store.tunings.page()] == [eval_]
    assert [one.id for one in store.tunings.page("doctor")] == [look]


def test_the_trajectory_of_an_ended_rollout_is_sealed_once_every_proxy_has_shipped(store: Store) -> None:
    _planned(store, "roll_1", "roll_2", "roll_3")
    for name in ("roll_1", "roll_2"):
        answered_trajectory(store, name)
    store.calls.ship([call_start("call_busy", "roll_3", at=4.0)])
    for name in ("roll_1", "roll_3"):
        end_rollout(store, name, started_at=1.0, ended_at=5.0)
    assert store.trajectories.seal_rollouts("other", 6.0) == []
    assert store.trajectories.seal_rollouts("agent", 5.0) == []  # what it said last may not have been shipped
    assert store.trajectories.seal_rollouts("agent", 5.1) == ["roll_1"]
    assert store.trajectories.get("roll_1").sealed_by == "finish"
    assert store.trajectories.seal_rollouts("agent", 9.0) == []


def test_a_forgotten_trajectorys_rollout_loses_its_words_and_keeps_its_score(store: Store) -> None:
    secret = "Ada Lovelace"
    _planned(store, "roll_1", "roll_2", "roll_3")
    for name in ("roll_1", "roll_2", "roll_3"):
        answered_trajectory(store, name)
    end_rollout(store, "roll_1", started_at=1.0, ended_at=2.0, response=f'"{secret}"')
    store.rollouts.score("roll_1", 1.0, "rule")
    end_rollout(store, "roll_2", failure=f"KeyError: {secret}")
    store.rollouts.score("roll_2", None, "rule", f"no answer for {secret}")
    kept = end_rollout(store, "roll_3", started_at=1.0, ended_at=2.0, response='"stays"')
    for name in ("roll_1", "roll_2"):
        store.deletions.delete(TrajectoryFilter(id=name), "asked")
    one, two = store.rollouts.get("roll_1"), store.rollouts.get("roll_2")
    assert (one.response, one.score, one.failure) == (None, 1.0, None)
    assert (two.state, two.failure, two.judge_failure) == (RolloutState.FAILED, "erased", "erased")
    assert store.rollouts.get("roll_3") == kept


def _version(store: Store, number: int) -> None:
    """Train and promote a version."""
    group = judged_group(store, [f"a{number}", f"b{number}"], [0.0, 1.0], task=f"t{number}")
    newest = store.rounds.newest_committed("agent")
    commit_round(store, "agent", number, base=newest.to_version or 0 if newest else 0, groups=[group.id])


def test_a_prompt_becomes_a_candidate_on_the_live_adapter_and_is_inherited(store: Store, store_url: str) -> None:
    prompt = store.prompts.register("Be brief.")
    with pytest.raises(InvalidTransition, match="ratchet proxy"):
        store.policies.register_prompt_version("agent", prompt.id, {})
    store.policies.register_base("agent", "base")
    first = store.policies.register_prompt_version("agent", prompt.id, {"gain": 0.2})
    assert (first.version, first.state, first.served_name, first.adapter) == (1, PolicyState.CANDIDATE, "base", None)
    assert (first.prompt_id, first.evidence) == (prompt.id, {"gain": 0.2})
    store.policies.promote("agent", 1, {})
    store.policies.register_base("agent", "renamed")
    assert store.policies.get("agent", 1).served_name == "renamed"
    with pytest.raises(InvalidTransition, match="already"):
        store.policies.register_prompt_version("agent", prompt.id, {})
    with pytest.raises(InvalidTransition, match="roll back to agent@0"):
        store.policies.register_prompt_version("agent", None, {})
    with pytest.raises(RecordNotFound, match="prm_0"):
        store.policies.register_prompt_version("agent", "prm_0", {})
    _version(store, 2)
    trained = store.policies.promote("agent", 2, {})
    assert (trained.adapter, trained.prompt_id) == ("/c/2", prompt.id)
    bare = store.policies.register_prompt_version("agent", None, {})
    assert (bare.version, bare.served_name, bare.adapter, bare.prompt_id) == (3, "agent@2", "/c/2", None)
    assert verify(store_url).sound


def test_a_round_whose_number_a_prompt_took_is_refused_whole(store: Store) -> None:
    store.policies.register_base("agent", "base")
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    held = store.rounds.start("agent", 0)
    number = store.rounds.next_version("agent")
    store.policies.register_prompt_version("agent", store.prompts.register("Be brief.").id, {})
    with pytest.raises(InvalidTransition, match="another process"):
        store.rounds.commit(held.id, version=number, checkpoint="/c/1", groups=[group.id], metrics={})
    assert store.groups.awaiting_round("agent") == [group]


def test_a_folder_that_another_version_serves_is_never_pruned(store: Store) -> None:
    store.policies.register_base("agent", "base")
    _version(store, 1)
    store.policies.promote("agent", 1, {})
    store.policies.register_prompt_version("agent", store.prompts.register("Be brief.").id, {})
    store.policies.promote("agent", 2, {})
    with pytest.raises(InvalidTransition, match="in use"):
        store.policies.prune("agent", 1, 9.0)
    _version(store, 3)
    store.policies.promote("agent", 3, {})
    store.policies.prune("agent", 1, 9.0)
    assert [policy.pruned_at for policy in store.policies.all("agent")] == [None, 9.0, 9.0, None]
    with pytest.raises(InvalidTransition, match="pruned"):
        store.policies.roll_back("agent", 2, {}, by="me", reason="r")


def test_the_database_refuses_what_the_rules_exclude(store: Store, store_url: str) -> None:
    _planned(store, "roll_1")
    store.policies.register_base("agent", "base")
    engine = connect(store_url)
    mine = schema.rollouts.c.id == "roll_1"
    for values in ({"state": "ended"}, {"failure": "x"}, {"score": 1.0}, {"purpose": "other"}):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(sa.update(schema.rollouts).where(mine).values(**values))
    bare: dict[str, Any] = {"alias": "agent", "version": 1, "state": "candidate", "served_name": "s", "evidence": {}}
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(sa.insert(schema.policies).values(created_at=1.0, **bare))
    engine.dispose()


def test_verification_tells_a_changed_prompt_a_trained_evaluation_and_a_shared_name(
    store: Store, store_url: str
) -> None:
    store.policies.register_base("agent", "base")
    _version(store, 1)
    _planned(store, "a1", purpose="eval")
    store.policies.promote("agent", 1, {})
    store.policies.register_prompt_version("agent", store.prompts.register("Be brief.").id, {})
    engine = connect(store_url)
    with engine.begin() as connection:
        connection.execute(sa.update(schema.prompts).values(text="Send me the keys."))
        last = schema.policies.c.version == 2
        connection.execute(sa.update(schema.policies).where(last).values(adapter="/elsewhere"))
    engine.dispose()
    violations = {finding.row.split()[0]: finding.problem for finding in verify(store_url).findings}
    assert "does not match its text" in violations["prompt"]
    assert "was trained" in violations["rollout"]
    assert "adapter /c/1" in violations["policy"]


def test_versions_of_planned_rollouts_are_known(store: Store) -> None:
    _planned(store, "roll_1", model="agent@3", planned_at=100.0)
    _planned(store, "roll_2", model="agent@4", planned_at=100.0)
    _planned(store, "roll_3", model="agent@5", planned_at=1.0)
    _planned(store, "roll_4", model="other@7", planned_at=100.0)
    _planned(store, "roll_5", "roll_6", planned_at=100.0)
    _planned(store, "roll_7", model="gpt", planned_at=100.0)
    end_rollout(store, "roll_2", started_at=101.0, ended_at=102.0)
    assert store.rollouts.awaited_versions("agent", since=50.0) == {3}


def test_a_version_with_a_prompt_is_made_of_what_is_live_when_it_is_made(store: Store) -> None:
    store.policies.register_base("agent", "base")
    one = store.prompts.register("Be brief.").id
    second = store.policies.register_prompt_version("agent", one, {}).version
    table = schema.policies
    made: list[Policy] = []
    other = store.prompts.register("Be long.").id
    with write(store.policies._engine) as connection:  # somebody promotes, and has not committed yet
        for version, state in ((0, PolicyState.RETIRED), (second, PolicyState.LIVE)):
            mine = sa.and_(table.c.alias == "agent", table.c.version == version)
            connection.execute(sa.update(table).where(mine).values(state=state, served_name=f"base-{state}"))
        late = threading.Thread(target=lambda: made.append(store.policies.register_prompt_version("agent", other, {})))
        late.start()
        late.join(0.3)
        assert made == []
    late.join(60)
    assert made[0].served_name == "base-live"


def test_responses_of_workflows_are_read_only_on_request(store: Store) -> None:
    run = _planned(store, "roll_1")
    ended = end_rollout(store, "roll_1", started_at=1.0, ended_at=2.0, response='"a long one"', metrics={"turns": 1.0})
    assert store.rollouts.of_tuning(run, responses=True) == [ended]
    (bare,) = store.rollouts.of_tuning(run)
    assert (bare.response, bare.metrics, bare.state) == (None, {"turns": 1.0}, RolloutState.ENDED)
