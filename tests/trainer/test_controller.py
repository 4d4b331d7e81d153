"""The controller, from shipped calls to a live version: a real learner on a tiny model, a real store, a scripted
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ratchet.store.errors import StoreUnavailable
from ratchet.store.operation_records import Rollout
from ratchet.store.records import Policy
from ratchet.store.states import GroupState, PolicyState, RoundState, ToolResult, TrajectoryState
from ratchet.store.store import Store
from ratchet.store.training.rounds import Rounds
from ratchet.trainer.adapters.checkpoint import newest_complete
from ratchet.trainer.advantages import MemberAdvantages
from ratchet.trainer.errors import CheckpointDamaged, OutOfMemory, TrainingDiverged
from ratchet.trainer.rounds.round_runner import RoundRunner
from tests.harness.records import end_rollout, tool_called
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.scripted_learner import ScriptedLearner
from tests.harness.trainer.stepped_controller import SteppedController


class OutageAtCommit(Rounds):
    """The rounds of a store that is away at the first commit."""

    def __init__(self, store: Store) -> None:
        super().__init__(store._engine)
        self.outages = 1

    def commit(self, round_id: str, **values: Any) -> Policy:
        if self.outages:
            self.outages -= 1
            raise StoreUnavailable("scripted outage")
        return super().commit(round_id, **values)


def test_shipped_calls_become_a_live_version_that_is_proven_to_be_served(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine, tmp_path: Path
) -> None:
    trained = agents_work(store, "a", [0.0, 1.0]) + agents_work(store, "b", [1.0, 0.0])
    agents_work(store, "flat", [1.0, 1.0])
    controller = make_controller()
    controller.step(1000.0)
    assert {store.trajectories.get(name).state for name in trained} == {TrajectoryState.TRAINED}
    assert store.trajectories.drop_counts() == {"no_variance": 2}
    live = store.policies.live()["agent"]
    assert live.version == 1
    assert list(engine.loaded) == ["agent@1"]
    (held,) = store.rounds.page("agent")
    assert (held.state, held.metrics["reward"], held.metrics["groups"]) == (RoundState.COMMITTED, 0.5, 2)
    assert held.metrics["weight_change"] > 0
    assert held.checkpoint == str(newest_complete(tmp_path / "checkpoints"))


def test_a_round_waits_for_enough_groups_but_not_for_ever(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    controller = make_controller()
    controller.step(1000.0)
    assert store.rounds.page("agent") == []
    controller.step(1000.0 + 601.0)
    assert store.policies.live()["agent"].version == 1


@pytest.mark.slow
def test_a_restarted_trainer_goes_on_from_the_last_commit(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    make_controller().step(1000.0)
    agents_work(store, "c", [0.0, 1.0])
    agents_work(store, "d", [0.0, 1.0])
    again = make_controller()
    assert again.learner.step == 1
    again.step(2000.0)
    assert store.policies.live()["agent"].version == 2
    assert [round.from_version for round in store.rounds.page("agent")] == [1, 0]


def test_a_power_cut_between_checkpoint_and_commit_trains_nothing_twice(
    store: Store, make_controller: Callable[..., SteppedController], tiny_model: Path, tmp_path: Path
) -> None:
    names = agents_work(store, "a", [0.0, 1.0]) + agents_work(store, "b", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    groups = store.groups.awaiting_round("agent")
    runner = RoundRunner(store, "agent", tmp_path / "checkpoints")
    learner = ScriptedLearner()
    learner.host.error_after_save = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner.run_round(learner, groups, 0)
    assert newest_complete(tmp_path / "checkpoints") is not None
    assert {store.groups.get(group.id).state for group in groups} == {GroupState.JUDGED}

    again = make_controller()
    assert again.learner.step == 0
    again.step(1000.0)
    assert {store.trajectories.get(name).state for name in names} == {TrajectoryState.TRAINED}
    assert [(held.state, held.to_version) for held in store.rounds.page("agent")] == [
        (RoundState.COMMITTED, 2),  # the number of the checkpoint that nothing names is not given again
        (RoundState.ABANDONED, None),
    ]


def test_a_store_outage_at_the_commit_trains_nothing_twice(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    controller = make_controller()
    store.rounds = OutageAtCommit(store)
    controller.step(1000.0)
    assert [held.state for held in store.rounds.page("agent")] == [RoundState.STARTED]
    controller.step(1001.0)  # an outage is tried again after a pause
    controller.step(1003.0)
    assert controller.learner.step == 1  # the learner began again: it took this step once
    assert [held.state for held in store.rounds.page("agent")] == [RoundState.COMMITTED, RoundState.ABANDONED]


@pytest.mark.slow
def test_a_leader_that_was_overtaken_goes_on_from_what_the_other_one_committed(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    paused = make_controller()
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    make_controller().step(1000.0)
    agents_work(store, "c", [0.0, 1.0])
    agents_work(store, "d", [0.0, 1.0])
    paused.step(1001.0)
    assert paused.learner.step == 2
    committed = [held for held in store.rounds.page("agent") if held.state is RoundState.COMMITTED]
    assert [(held.from_version, held.to_version) for held in committed] == [(1, 2), (0, 1)]


def test_a_round_that_diverges_is_put_aside_loudly(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    names = agents_work(store, "a", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    runner = RoundRunner(store, "agent", tmp_path / "checkpoints")
    learner = ScriptedLearner()
    learner.host.error = TrainingDiverged("the gradient's norm is nan")
    with pytest.raises(TrainingDiverged):
        runner.run_round(learner, store.groups.awaiting_round("agent"), 0)
    assert store.trajectories.get(names[0]).drop_reason == "diverged"
    assert store.alarms.active()[0].name == "diverged:agent"


def test_a_round_that_is_broken_off_says_why_and_its_groups_wait_for_the_next(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    runner = RoundRunner(store, "agent", tmp_path / "checkpoints")
    learner = ScriptedLearner()
    learner.host.error = OutOfMemory("lower learner.token_budget")
    with pytest.raises(OutOfMemory):
        runner.run_round(learner, store.groups.awaiting_round("agent"), 0)
    (held,) = store.rounds.page("agent")
    assert (held.state, held.reason) == (RoundState.ABANDONED, "OutOfMemory: lower learner.token_budget")
    (alarm,) = store.alarms.active()
    assert (alarm.name, alarm.reason) == ("round_aborted:agent", f"round {held.id} was aborted: {held.reason}")
    assert runner.run_round(controller.learner, store.groups.awaiting_round("agent"), 0) is not None
    assert not store.alarms.active()


@pytest.mark.slow
def test_a_sequence_that_is_too_long_for_the_model_is_left_out_and_the_rest_is_trained(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0], prompt=(5,) * 2000)
    make_controller().step(1000.0)
    (held,) = store.rounds.page("agent")
    assert held.metrics["untrained_tokens"] == {"exceeds_model": 6}


def test_a_round_of_greedy_answers_is_an_alarm_that_names_the_remedy_and_ends_with_the_next_round(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0], temperature=0)
    controller = make_controller(groups_per_round=1)
    controller.step(1000.0)
    (alarm,) = store.alarms.active()
    assert alarm.name == "untrainable:agent"
    assert "6 tokens greedy (" in alarm.reason
    assert store.groups.drop_counts("agent") == {"untrainable": 1}
    agents_work(store, "b", [0.0, 1.0])
    controller.step(1001.0)
    assert store.alarms.active() == []


@pytest.mark.slow
def test_gathering_judging_and_training_are_followed(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    controller = make_controller()
    controller.step(1000.0)
    agents_work(store, "c", [0.5, 1.0])
    controller.step(1001.0)

    def metric(name: str, work: str, **labels: str) -> float | None:
        return controller.metrics.registry.get_sample_value(name, {"alias": "agent", "phase": work, **labels})

    assert metric("ratchet_progress_items_done", "training") == metric("ratchet_progress_items", "training") == 4
    assert metric("ratchet_progress_items_done", "judging") == 1
    assert metric("ratchet_progress_mean", "judging", metric="reward") == 0.75
    assert (metric("ratchet_progress_items_done", "gathering"), metric("ratchet_progress_items", "gathering")) == (1, 2)
    assert metric("ratchet_progress_mean", "gathering", metric="tokens") == 3


@pytest.mark.slow
def test_while_a_tool_is_sick_no_step_is_taken_and_what_was_judged_waits(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    controller = make_controller(sentinel={"interval_seconds": 1.0})
    tool_called(store, "a-0", ToolResult.TIMEOUT)
    controller.step(1000.0)
    assert [len(store.groups.awaiting_round("agent")), store.rounds.page("agent")] == [2, []]
    assert "training_paused:agent" in {alarm.name for alarm in store.alarms.active()}
    tool_called(store, "b-1", ToolResult.OK)
    controller.step(1001.0)
    assert store.policies.live()["agent"].version == 1


@pytest.mark.slow
def test_rejected_versions_do_not_make_the_traffic_stale(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    controller = make_controller(max_staleness=0, groups_per_round=1)
    honest = engine.scorer
    engine.scorer = lambda name, ids: honest("base", ids)
    for task in "abc":
        agents_work(store, task, [0.0, 1.0], prompt=range(5, 25))  # places enough to call a version wrong
        controller.step(1000.0)
    assert [store.policies.get("agent", version).state for version in (1, 2, 3)] == [PolicyState.REJECTED] * 3
    engine.scorer = honest
    agents_work(store, "d", [0.0, 1.0])
    controller.step(1000.0)
    assert store.trajectories.drop_counts() == {}
    assert store.policies.live()["agent"].version == 4


def test_what_ended_after_the_verdict_is_not_trained_by_it(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    first = store.groups.awaiting_round("agent")[0]
    members = [store.trajectories.read(name) for name in first.members]
    verdicts = [msgspec.structs.replace(v, judged_at=1.0) for v in store.groups.verdicts(first.members).values()]
    runner = RoundRunner(store, "agent", controller.settings.checkpoints)
    built = [
        runner.rows(member, verdict, MemberAdvantages(1.0)) for member, verdict in zip(members, verdicts, strict=True)
    ]
    assert [(rows.rows, rows.untrained) for rows in built] == [((), {"after_verdict": 3})] * 2


def test_a_damaged_checkpoint_stops_the_trainer_with_its_path(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    make_controller().step(1000.0)
    (tmp_path / "checkpoints" / "0001" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match="0001"):
        make_controller()


@pytest.mark.slow
def test_groups_that_are_too_old_are_dropped_as_stale(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(max_staleness=0, groups_per_round=1)
    agents_work(store, "a", [0.0, 1.0])
    controller.step(1000.0)
    for task in "bcd":
        agents_work(store, task, [0.0, 1.0])
    controller.step(1001.0)
    assert store.trajectories.drop_counts() == {"stale": 6}
    agents_work(store, "e", [0.0, 1.0])
    make_controller(max_staleness=0, groups_per_round=1).step(1002.0)  # goes on counting
    (reason,) = (alarm.reason for alarm in store.alarms.active() if alarm.name == "stale:agent")
    assert reason.startswith("the last 4 groups were all sampled more than 0 versions ago; raise max_staleness")


@pytest.mark.slow
def test_a_candidate_that_a_dead_trainer_left_is_published_by_the_next(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    runner = RoundRunner(store, "agent", controller.settings.checkpoints)
    left = runner.run_round(controller.learner, store.groups.awaiting_round("agent"), 0)
    assert isinstance(left, Policy)
    make_controller().step(1001.0)
    assert store.policies.live()["agent"].version == 1


@pytest.mark.slow
def test_an_ungrouped_trajectory_is_compared_with_earlier_scores_of_its_family(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(
        ungrouped="baseline", min_baseline_samples=3, groups_per_round=1, group_wait_seconds=1.0
    )
    for number, score in enumerate([0.0, 1.0, 0.0, 1.0, 0.0]):
        agents_work(store, f"mail/{number}", [score])
        controller.step(1000.0 + number)
    controller.step(2000.0)
    assert store.trajectories.drop_counts() == {"baseline_only": 3}
    rounds = store.rounds.page("agent")
    assert [held.metrics["trajectories"] for held in rounds if held.state == "committed"] == [2]


def test_what_an_abandoned_rollout_called_is_never_learnt_from(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = agents_work(store, "a", [0.0, 1.0]) + agents_work(store, "b", [0.0, 1.0])
    tuning = store.tunings.begin("weights", "agent", {}).id
    store.rollouts.plan([
        Rollout(id=name, tuning_id=tuning, task_id="t", split="train", attempt=0, candidate="live", planned_at=1.0)
        for name in names
    ])  # fmt: skip
    store.tunings.resume(tuning)
    make_controller().step(1000.0)
    assert store.trajectories.drop_counts() == {"abandoned": 4}
    assert store.policies.live()["agent"].version == 0


def test_without_a_baseline_setting_ungrouped_trajectories_are_dropped_with_the_reason(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(group_wait_seconds=1.0)
    agents_work(store, "mail/1", [1.0])
    controller.step(1000.0)
    controller.step(1002.0)
    assert store.trajectories.drop_counts() == {"ungrouped": 1}


@pytest.mark.slow
def test_a_version_that_is_being_compared_keeps_its_folder_until_that_is_over(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    controller = make_controller(keep_checkpoints=1, keep_optimizer_states=1, keep_loaded_adapters=0)
    tuning = store.tunings.begin("select-model", "agent", {})
    for number, moment in enumerate((1000.0, 2000.0, 3000.0)):
        agents_work(store, f"a{number}", [0.0, 1.0], version=number)
        agents_work(store, f"b{number}", [1.0, 0.0], version=number)
        controller.step(moment)
        if number == 0:
            store.rollouts.plan([
                Rollout(id="roll_1", tuning_id=tuning.id, task_id="t", split="test", attempt=0, candidate="agent@1",
                        model="agent@1", purpose="eval", planned_at=time.time())
            ])  # fmt: skip
    assert store.policies.live()["agent"].version == 3
    folders = tmp_path / "checkpoints"
    assert [folder.name for folder in sorted(folders.glob("0*"))] == ["0001", "0003"]
    assert store.policies.get("agent", 1).pruned_at is None
    end_rollout(store, "roll_1", failure="stopped", ended_at=time.time())
    controller.step(4000.0)
    assert [folder.name for folder in sorted(folders.glob("0*"))] == ["0003"]
