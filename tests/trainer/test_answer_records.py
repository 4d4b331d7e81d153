"""What a round writes about its answers, and a reason for all that is not trained."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

from ratchet.store.reasons import UNTRAINED, DropReason
from ratchet.store.records import unpack_halves
from ratchet.store.states import CallState
from ratchet.trainer.rows import build_rows
from ratchet.trainer.rows.build_rows import Rows
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.rows.trajectory_export import REJECTED, AnswerRecords
from tests import house

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
