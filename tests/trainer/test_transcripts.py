"""A trajectory is read once between its judge and its round, unless it has gone on meanwhile."""

from __future__ import annotations

from ratchet.store.calls.trajectories import Trajectories
from ratchet.store.records import Transcript
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.judge_runner import TranscriptCache
from tests.harness.records import answered_trajectory, call_start, ended


class CountingReads(Trajectories):
    """Trajectories whose every read is written down."""

    def __init__(self, store: Store) -> None:
        super().__init__(store._engine)
        self.names: list[str] = []

    def read(self, trajectory_id: str, *, tokens: bool = True) -> Transcript:
        self.names.append(trajectory_id)
        return super().read(trajectory_id, tokens=tokens)


def test_what_the_judge_was_given_is_not_read_again_for_the_round(store: Store) -> None:
    for name in ("a", "b"):
        answered_trajectory(store, name)
    store.trajectories = reads = CountingReads(store)
    transcripts = TranscriptCache(store)
    given = [transcripts.read(name) for name in ("a", "b")]
    assert transcripts.pop(["a", "b"]) == given
    assert reads.names == ["a", "b"]
    transcripts.pop(["a"])
    assert reads.names == ["a", "b", "a"]  # it is kept for one round


def test_a_trajectory_that_has_gone_on_is_read_again(store: Store) -> None:
    answered_trajectory(store, "a")
    transcripts = TranscriptCache(store)
    assert len(transcripts.read("a").calls) == 1
    store.calls.ship([ended(call_start("call_late", "a", at=50.0), {"role": "assistant", "content": "more"})])
    assert len(transcripts.pop(["a"])[0].calls) == 2


def test_no_more_than_so_many_are_kept(store: Store) -> None:
    for name in ("a", "b", "c"):
        answered_trajectory(store, name)
    store.trajectories = reads = CountingReads(store)
    transcripts = TranscriptCache(store, max_entries=2)
    for name in ("a", "b", "c"):
        transcripts.read(name)
    transcripts.pop(["a", "b", "c"])
    assert reads.names == ["a", "b", "c", "a"]
