"""AnswerRecords: what a round does with each sampled answer: its advantage and mismatch, or why it carries no loss."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from ratchet.store.records import AnswerTraining
from ratchet.trainer.rows.build_rows import AnswerKey, Rows
from ratchet.trainer.rows.token_row import TokenRow

REJECTED = "sequence_mask"  # the learner rejected the whole row: another policy sampled it
_FLOAT16 = 2  # bytes
_LARGEST = 65504.0  # of float16


class AnswerRecords:
    """Collects the answers of a round's rows."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, tuple[int, ...]], Mapping[AnswerKey, int]] = {}
        self._untrained: dict[AnswerKey, str] = {}

    def add(self, built: Rows) -> None:
        """Add the rows of a trajectory."""
        self._untrained |= built.untrained_answers
        for row, answers in zip(built.rows, built.answers, strict=True):
            self._answers[row.trajectory_id, row.ids] = answers

    def leave_out(self, row: TokenRow, reason: str) -> None:
        """Note that a row is not trained."""
        self._untrained |= dict.fromkeys(self._answers.pop((row.trajectory_id, row.ids), {}), reason)

    def of_round(self, rows: Sequence[TokenRow], mismatch: Sequence[bytes | None]) -> list[AnswerTraining]:
        """Return a record of every answer. `mismatch`: as in RoundReport, of the rows; none if it is shorter."""
        found: list[AnswerTraining] = []
        for place, row in enumerate(rows):
            packed = mismatch[place] if place < len(mismatch) else b""
            if packed is None:
                self.leave_out(row, REJECTED)
            else:
                found += _of_row(row, self._answers.get((row.trajectory_id, row.ids), {}), packed)
        return found + [
            AnswerTraining(call_id=call_id, choice=choice, untrained=reason)
            for (call_id, choice), reason in self._untrained.items()
        ]


def _of_row(row: TokenRow, answers: Mapping[AnswerKey, int], mismatch: bytes) -> Iterator[AnswerTraining]:
    """Yield the records of a row's answers, which begin at these places and carry loss at all their tokens."""
    seen = 0  # trained tokens before the answer
    begins = sorted(answers.items(), key=lambda one: one[1])
    for ((call_id, choice), begin), (_, end) in pairwise([*begins, (("", 0), len(row.ids))]):
        size = sum(row.mask[begin:end])
        advantages = (row.advantage,) * size if row.advantages is None else row.advantages[begin : begin + size]
        yield AnswerTraining(
            call_id=call_id,
            choice=choice,
            advantage=fmean(advantages) if len(set(advantages)) > 1 else advantages[0],
            advantages=_pack(advantages) if len(set(advantages)) > 1 else b"",
            mismatch=mismatch[_FLOAT16 * seen : _FLOAT16 * (seen + size)],
        )
        seen += size


def _pack(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *(max(-_LARGEST, min(_LARGEST, value)) for value in values))
