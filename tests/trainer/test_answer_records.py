"""What a round reads and writes: transcripts once, each answer with its advantage or the reason for no loss."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

from ratchet.store.calls.trajectories import Trajectories
from ratchet.store.reasons import UNTRAINED, DropReason
from ratchet.store.records import Transcript, unpack_halves
from ratchet.store.states import CallState
from ratchet.store.store import Store
from ratchet.trainer.judges.judge_runner import TranscriptCache
from ratchet.trainer.rows import build_rows
from ratchet.trainer.rows.build_rows import Rows
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.rows.trajectory_export import REJECTED, AnswerRecords
from tests import house
from tests.harness.records import answered_trajectory, call_start, ended

ROW = TokenRow("t", (1, 2, 3, 4, 5, 6), (0, 1, 1, 0, 1, 1), (0.0, -1.0, -1.0, 0.0, -1.0, -1.0), 0.5)
ANSWERS = {("call_1", 0): 1, ("call_2", 0): 4}
BUILT = Rows((ROW,), {}, (ANSWERS,), {("call_3", 0): "greedy"})


def _records() -> AnswerRecords:
    records = AnswerRecords()
    records.add(BUILT)
    return records


def test_each_answer_gets_its_part_of_the_rows_mismatch_and_its_own_advantage() -> None:
    by_turn = replace(ROW, advantages=(0.5, 0.5, 0.5, 0.5, 1.5, 1.5), age=1)
    found = _records().of_round([by_turn], [struct.pack("<4e", 0.25, 0.5, -1.0, 0.0)])
    assert [(one.call_id, one.advantage, one.untrained, unpack_halves(one.mismatch)) for one in found] == [
        ("call_1", 0.5, None, (0.25, 0.5)),
        ("call_2", 1.5, None, (-1.0, 0.0)),
        ("call_3", None, "greedy", ()),
    ]


def test_rows_that_were_left_out_or_rejected_have_the_reason() -> None:
    records = _records()
    records.leave_out(ROW, "too_long")
    assert {one.call_id: one.untrained for one in records.of_round([], [])} == {
        "call_1": "too_long", "call_2": "too_long", "call_3": "greedy",
    }  # fmt: skip
    rejected = _records().of_round([ROW], [None])
    assert {one.untrained for one in rejected} == {REJECTED, "greedy"}


def test_advantages_that_differ_within_an_answer_are_kept_for_each_token() -> None:
    row = replace(ROW, advantages=(0.0, 0.5, 1.5, 0.0, 2.0, 2.0))
    first, second, _ = _records().of_round([row], [])
    assert (first.advantage, unpack_halves(first.advantages)) == (1.0, (0.5, 1.5))
    assert (second.advantage, second.advantages) == (2.0, b"")


def test_a_learner_that_reports_no_mismatch_leaves_it_empty() -> None:
    first, *_ = _records().of_round([ROW], ())
    assert (first.advantage, first.mismatch) == (0.5, b"")


def test_every_reason_of_an_untrained_token_is_explained() -> None:
    source = Path(build_rows.__file__).read_text()
    given = set(re.findall(r'(?:return|untrained\[)\s*"([a-z_]+)"', source)) | set(CallState) - {CallState.ANSWERED}
    assert {"greedy", "no_token_ids"} <= given
    assert given | {build_rows._ANSWER_LOST, build_rows.TRUNCATED} <= set(UNTRAINED)


def test_the_documentation_lists_the_same_reasons() -> None:
    page = (house.ROOT / "docs" / "sentinel.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE)
    assert {(str(reason), reason.meaning) for reason in DropReason} <= set(rows)
    assert set(UNTRAINED.items()) <= set(rows)


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
