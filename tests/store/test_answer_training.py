"""Records of trained answers: written once, read by call, deleted with their call."""

from __future__ import annotations

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.records import AnswerTraining
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory


def test_records_of_trained_answers_are_written_once_and_deleted_with_their_call(store: Store) -> None:
    store.policies.register_base("agent", "agent")
    answered_trajectory(store, "a")
    round_ = store.rounds.start("agent", 0)
    trained = AnswerTraining(call_id="call_a", choice=0, advantage=0.5, mismatch=b"\x00\x3c\x00\x00")
    deleted = AnswerTraining(call_id="call_gone", choice=0, untrained="greedy")
    for _ in range(2):
        store.answer_training.record(round_.id, [trained, deleted])
    (found,) = store.answer_training.of_calls(["call_a", "call_gone"])
    assert (found.advantage, found.mismatch, found.round_id) == (0.5, trained.mismatch, round_.id)
    store.trajectories.seal("a", now=9.0)
    store.deletions.delete(TrajectoryFilter(id="a"), "asked", timeout_seconds=0.0)
    assert store.answer_training.of_calls(["call_a"]) == []
