"""Resamples: planned once, asked for at most once, gone with their original; in every database."""

from __future__ import annotations

import pytest

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.records import RESAMPLE, Verdict
from ratchet.store.states import ResampleState, TrajectoryState
from ratchet.store.store import Store
from ratchet.store.verify import verify
from tests.harness.records import answered_trajectory, commit_round


def planned(store: Store, count: int = 2, name: str = "original") -> list[str]:
    """A sealed trajectory with its resamples; their ids."""
    answered_trajectory(store, name)
    run = store.trajectories.seal(name, 2.0)
    store.resamples.plan(run, count, 9, 3.0)
    return [one.id for one in store.resamples.pending("agent", [name])]


def test_a_resample_changes_state_once(store: Store) -> None:
    first, second, third = planned(store, 3)
    store.resamples.mark_requested(first, 4.0)
    for again in (store.resamples.mark_requested, store.resamples.mark_requested):
        with pytest.raises(InvalidTransition, match="requested and cannot become requested"):
            again(first, 5.0)
    store.resamples.mark_answered(first, 6.0, tokens=12)
    store.resamples.mark_requested(second, 7.0)
    store.resamples.mark_failed(second, 8.0, "the proxy was away")
    store.resamples.mark_failed(third, 8.0, "vLLM was busy")
    with pytest.raises(InvalidTransition):
        store.resamples.mark_answered(second, 9.0, tokens=1)
    assert [one.over for one in store.resamples.pending("agent")] == [True] * 3
    assert store.resamples.get(second).failure == "the proxy was away"
    counts = store.resamples.counts("agent")
    assert {state: (one.count, one.tokens) for state, one in counts.items()} == {
        ResampleState.ANSWERED: (1, 12), ResampleState.FAILED: (2, 18),
    }  # fmt: skip
    assert store.resamples.counts("another") == {}
    with pytest.raises(RecordNotFound):
        store.resamples.get("shad_x")


def test_an_original_has_one_set_of_resamples(store: Store) -> None:
    planned(store)
    with pytest.raises(InvalidTransition, match="planned before"):
        store.resamples.plan(store.trajectories.get("original"), 1, 9, 4.0)
    assert len(store.resamples.pending("agent")) == 2


def test_recent_requests_count_with_their_estimated_tokens(store: Store) -> None:
    first, second = planned(store)
    store.resamples.mark_requested(first, 100.0)
    store.resamples.mark_requested(second, 130.0)
    store.resamples.mark_answered(second, 131.0, tokens=40)
    assert (store.resamples.usage_since("agent", 99.0).count, store.resamples.usage_since("agent", 99.0).tokens) == (
        2,
        49,
    )
    assert (store.resamples.usage_since("agent", 100.0).count, store.resamples.usage_since("agent", 100.0).tokens) == (
        1,
        40,
    )


def test_the_trajectory_of_a_resample_is_sealed_once_every_proxy_has_shipped_it(store: Store) -> None:
    first, second = planned(store)
    for name in (first, second):
        answered_trajectory(store, name, purpose=RESAMPLE)
        store.resamples.mark_requested(name, 4.0)
    store.resamples.mark_answered(first, 5.0, tokens=9)
    store.resamples.seal_trajectories("agent", 5.0)
    assert store.resamples.sealed_of("original") == []
    store.resamples.seal_trajectories("agent", 5.1)
    assert store.resamples.sealed_of("original") == [first]
    assert store.trajectories.get(second).state is TrajectoryState.OPEN
    assert store.resamples.originals_of([first, "shad_x"]) == {first: "original"}


def test_only_waiting_originals_have_pending_resamples(store: Store) -> None:
    planned(store)
    store.trajectories.drop(["original"], "ungrouped")
    assert store.resamples.pending("agent") == []


def test_scores_of_resamples_are_not_scores_of_traffic(store: Store) -> None:
    resample, _ = planned(store)
    answered_trajectory(store, resample, purpose=RESAMPLE)
    names = ("original", resample)
    verdicts = [
        Verdict(trajectory_id=name, group_id=None, judge="rule", judge_version="1", score=0.5) for name in names
    ]
    store.groups.replace_verdicts(verdicts)
    assert [one.trajectory_id for one in store.groups.past_scores("agent", "1")] == ["original"]


@pytest.mark.parametrize(
    "chosen", [TrajectoryFilter(id="original"), TrajectoryFilter(until=99.0), TrajectoryFilter(version=0)]
)
def test_every_deletion_of_an_original_deletes_its_resamples(store: Store, chosen: TrajectoryFilter) -> None:
    resample, _ = planned(store)
    answered_trajectory(store, resample, purpose=RESAMPLE, key_id="key_of_the_trainer")
    assert store.deletions.count(chosen) == 2
    assert store.deletions.delete(chosen, "asked for").trajectory_count == 2
    assert store.resamples.counts("agent") == {}


def test_a_resample_trained_in_another_group_than_its_original_is_reported(store: Store, store_url: str) -> None:
    resamples = planned(store)
    for name in resamples:
        answered_trajectory(store, name, purpose=RESAMPLE)
        store.trajectories.seal(name, 4.0)
    group = store.groups.create("t", "agent", resamples, 5.0)
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=score)
        for name, score in zip(resamples, (0.0, 1.0), strict=True)
    ]
    store.groups.record_verdicts(group.id, verdicts)
    store.policies.register_base("agent", "base")
    commit_round(store, "agent", 1, groups=[group.id])
    violations = {finding.row: finding.problem for finding in verify(store_url).findings}
    assert "not in the group of its original" in violations[f"resample {resamples[0]}"]
