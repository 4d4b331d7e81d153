"""Teacher scores: bit for bit as they were given, deleted with their trajectory."""

from __future__ import annotations

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.records import AnswerLogprobs, TeacherScore, Verdict, pack_logprobs, unpack_logprobs
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory


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
