"""What a round leaves at the calls and trajectories it trained: answers, teacher scores, and which ids were sampled."""

from __future__ import annotations

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.content.token_sequences import sampled_spans, sequences, token_call
from ratchet.store.records import (
    AnswerLogprobs,
    AnswerTraining,
    Call,
    Choice,
    TeacherScore,
    Verdict,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from ratchet.store.states import CallState
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


def scored(store: Store, name: str, *logprobs: float) -> TeacherScore:
    """Score a trajectory as a group of its own."""
    group = store.groups.create("k", "agent", [name], now=101.0)
    verdict = Verdict(trajectory_id=name, group_id=group.id, judge="teacher:big", judge_version="1", score=0.5)
    answer = AnswerLogprobs(call_id=f"call_{name}", choice=0, logprobs=pack_logprobs(logprobs))
    score = TeacherScore(trajectory_id=name, teacher="teacher:big", answers=(answer,))
    store.groups.record_verdicts(group.id, [verdict], teacher_scores=[score])
    return score


def test_teacher_scores_are_stored_with_the_verdict_and_deleted_with_the_trajectory(store: Store) -> None:
    for name in ("a", "b"):
        answered_trajectory(store, name)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    first, second = scored(store, "a", -0.125, -30.5), scored(store, "b", -1.0)
    found = store.groups.teacher_scores(["a", "b", "unknown"])
    assert found == {"a": first, "b": second}
    assert unpack_logprobs(found["a"].answers[0].logprobs) == (-0.125, -30.5)
    store.deletions.delete(TrajectoryFilter(id="a"), "requested")
    assert store.groups.teacher_scores(["a", "b"]) == {"b": second}


def call(name: str, context: str, prompt: list[int], *answers: list[int], parent: tuple[str, int] = ("", 0)) -> Call:
    choices = tuple(
        Choice(index=k, finish_reason="stop", token_ids=pack_ids(ids), logprobs=b"") for k, ids in enumerate(answers)
    )
    return Call(
        id=name, trajectory_id="t", state=CallState.ANSWERED, alias="a", version=0, dialect="chat", streamed=False,
        linked_by="graph", parent_call=parent[0] or None, parent_choice=parent[1], role=None, sampling={},
        prompt_node="", tools_hash="", context=context, prompt_ids=pack_ids(prompt), prompt_tokens=0,
        completion_tokens=0, started_at=0.0, first_byte_at=None, ended_at=None, status=200, untrainable=None,
        error=None, choices=tuple(choices),
    )  # fmt: skip


def test_spans_name_the_sampled_ids_along_the_branch_that_was_taken() -> None:
    calls = [
        call("one", "root", [1, 2, 3], [10, 11], [12, 13, 14]),
        call("two", "exact", [4], [20], parent=("one", 1)),
        call("three", "exact", [5, 6], [30, 31], parent=("two", 0)),
    ]
    ids = unpack_ids(sequences(map(token_call, calls))["three", 0])
    spans = sampled_spans(calls, ("three", 0))
    assert [ids[a:b] for a, b in spans] == [(12, 13, 14), (20,), (30, 31)]
    assert spans[-1][1] == len(ids)


def test_a_fork_starts_a_new_sequence() -> None:
    calls = [call("one", "root", [1], [10]), call("two", "fork", [1, 9, 4], [20], parent=("one", 0))]
    assert sampled_spans(calls, ("two", 0)) == ((3, 4),)
