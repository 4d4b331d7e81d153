"""Trajectories that are damaged in the store stop nothing; `test_controller_process.py` has how training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import sqlalchemy as sa

from ratchet.store.errors import RecordDamaged
from ratchet.store.records import Transcript
from ratchet.store.states import RoundState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.judges.judge_runner import JudgeRunner
from ratchet.trainer.judges.judgement import GroupJudgement, NamedJudge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.release.evaluation import compare_pairs
from ratchet.trainer.release.invariants import newest_prompts
from ratchet.trainer.rounds.round_runner import RoundRunner
from ratchet.trainer.settings.judge_specs import read_spec
from tests.harness.trainer.agents import agents_work, damage_tokens
from tests.harness.trainer.stepped_controller import SteppedController
from tests.trainer.test_feedback import WAITING, say

JUDGE = "tests.harness.trainer.judge_samples:scripted"


def damage_logprobs(store: Store) -> None:
    with store._engine.begin() as connection:
        connection.execute(sa.text("UPDATE choices SET logprobs = :bytes"), {"bytes": b"\x00\x01\x02"})


def damage_messages(store: Store, content: bytes = b"\x01\xff") -> None:
    """Overwrite the body of every stored message."""
    with store._engine.begin() as connection:
        connection.execute(sa.text("UPDATE messages SET body = :bytes"), {"bytes": content})


def test_a_group_of_damaged_trajectories_is_dropped_with_them(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = agents_work(store, "a", [0.0, 1.0])
    make_controller(groups_per_round=9).step(1000.0)
    (group,) = store.groups.awaiting_round("agent")
    assert store.groups.drop_members(names[:1], "damaged") == 1
    assert store.groups.drop_members(names, "damaged") == 1  # the first one is dropped already
    assert store.groups.drop_members([""], "damaged") == 0
    assert store.groups.get(group.id).drop_reason == "damaged"


@pytest.mark.parametrize("content", [b"\x01\xff", b"[nothing", b'"text"', b'{"role":"user","content":"\xff"}'])
def test_the_error_names_the_trajectory_and_the_remedy(store: Store, content: bytes) -> None:
    names = agents_work(store, "a", [0.0, 1.0])
    damage_messages(store, content)
    with pytest.raises(RecordDamaged, match=f"trajectory {names[0]} is damaged.*ratchet store verify") as raised:
        store.trajectories.read(names[0])
    assert raised.value.trajectory_id == names[0]
    assert str(raised.value).count("ratchet store verify") == 1


def test_logprobs_that_are_cut_off_are_damage(store: Store) -> None:
    names = agents_work(store, "a", [0.0])
    damage_logprobs(store)
    with pytest.raises(RecordDamaged, match="logprobs of an answer to call call_a-0 are cut off"):
        store.trajectories.read(names[0])
    assert store.trajectories.read(names[0], tokens=False).calls


def test_a_damaged_system_prompt_is_an_empty_text(store: Store) -> None:
    agents_work(store, "a", [0.0])
    (call,) = store.calls.page(1)
    damage_messages(store, b'{"role":"system","content":"Be brief."}')
    assert store.trajectories.system_prompt(call.prompt_node) == "Be brief."
    damage_messages(store)
    assert store.trajectories.system_prompt(call.prompt_node) == ""


def test_what_waits_for_a_group_is_dropped_and_what_was_trained_stays(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    trained = agents_work(store, "a", [0.0, 1.0])
    make_controller(groups_per_round=1).step(1000.0)
    (waiting,) = agents_work(store, "b", [0.0])
    store.trajectories.seal(waiting, 1001.0)
    assert store.groups.drop_members([waiting, *trained], "damaged") == 1
    assert [store.trajectories.get(name).state for name in (waiting, *trained)] == [
        TrajectoryState.DROPPED, TrajectoryState.TRAINED, TrajectoryState.TRAINED,
    ]  # fmt: skip


def test_a_round_that_meets_damage_is_aborted_with_the_reason(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = agents_work(store, "a", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    damage_tokens(store, names[0])
    runner = RoundRunner(store, "agent", controller.settings.checkpoints)
    with pytest.raises(RecordDamaged, match=names[0]):
        runner.run_round(controller.learner, store.groups.awaiting_round("agent"), 0)
    (round_,) = store.rounds.page("agent")
    assert round_.state is RoundState.ABANDONED
    assert names[0] in str(round_.reason)


@pytest.mark.slow
def test_the_proof_of_a_version_reads_other_trajectories(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = agents_work(store, "a", [0.0, 1.0])
    controller = make_controller(groups_per_round=1)
    controller.step(1000.0)
    live = store.policies.live()["agent"]

    def contexts() -> set[tuple[int, ...]]:
        return set(RoundRunner(store, "agent", controller.settings.checkpoints).probes(live))

    both = contexts()
    damage_tokens(store, names[0])
    assert set() < contexts() < both
    damage_tokens(store, names[1])
    assert contexts() == set()


def test_readers_of_many_leave_out_what_is_damaged_or_deleted(store: Store) -> None:
    names = agents_work(store, "a", [0.0, 1.0, 0.5])
    damage_tokens(store, names[1])
    readable = store.trajectories.readable([*names, "gone"])
    assert [one.trajectory.id for one in readable] == [names[0], names[2]]
    damage_messages(store)
    assert list(store.trajectories.readable(names)) == []
    assert newest_prompts(store, "agent", 10) == []


def test_a_second_opinion_counts_a_damaged_pair_as_a_failure(store: Store) -> None:
    names = agents_work(store, "a", [0.0, 1.0] * 6)
    damage_tokens(store, names[11])
    pairs = list(zip(names[1::2], names[::2], strict=True))
    judge = make_judge(read_spec(JUDGE), {})
    opinion = compare_pairs(judge, pairs, store.trajectories.read)
    assert opinion is not None
    assert (opinion.prompts, opinion.difference) == (5, 1.0)
    for name in names[5:11:2]:
        damage_tokens(store, name)
    assert compare_pairs(judge, pairs, store.trajectories.read) is None


def test_late_feedback_on_a_damaged_trajectory_stops_nothing(
    store: Store, make_controller: Callable[..., SteppedController], caplog: pytest.LogCaptureFixture
) -> None:
    names = agents_work(store, "a", [0.0, 1.0])
    controller = make_controller(judge=WAITING, groups_per_round=9)
    for name, value in zip(names, (0.0, 1.0), strict=True):
        say(store, name, value)
    controller.step(1000.0)
    damage_tokens(store, names[0])
    say(store, names[0], 1.0)
    for _ in range(3):
        controller.step(1001.0)
    assert sum("rejudging_failed" in one.getMessage() for one in caplog.records) == 1
    assert store.feedback.applied_too_late("agent") == names[:1]
    assert store.groups.drop_members(names[:1], "damaged") == 1
    assert store.feedback.applied_too_late("agent") == []


def test_a_judge_that_meets_damage_while_it_judges_again_is_tried_again_later(store: Store) -> None:
    names = agents_work(store, "a", [0.0])
    store.trajectories.seal(names[0], 1.0)
    store.trajectories.drop(names, "ungrouped")
    say(store, names[0], 1.0)
    submitted = list[str]()

    class MeetsDamage(NamedJudge):
        name, version = "reads earlier calls", "1"

        def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
            submitted.extend(member.trajectory.id for member in members)
            raise RecordDamaged("an earlier call")

    runner = JudgeRunner(store, MeetsDamage(), attempts=3, retry_seconds=60.0)
    for now in (1000.0, 1030.0, 1061.0):
        runner.judge_again("agent", now)
        assert runner.collect_results(now, 60.0) == 0
    runner.close()
    assert submitted == names * 2


def test_late_feedback_on_a_dropped_member_is_judged_once(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = agents_work(store, "a", [0.0, 1.0, 0.5])
    controller = make_controller(judge=WAITING, groups_per_round=9, num_generations=3, min_group_size=2)
    for name, value in zip(names, (0.0, 1.0, 0.0), strict=True):
        say(store, name, value)
    controller.step(1000.0)
    assert store.groups.drop_members(names[:1], "too_long") == 1
    say(store, names[0], 1.0)
    for _ in range(3):
        controller.step(1001.0)
    assert store.feedback.applied_too_late("agent") == []
    assert store.groups.verdicts(names[:1])[names[0]].score == 1.0
