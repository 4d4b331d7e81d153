"""What rounds did with sampled answers: advantages, trainer-engine mismatch, reasons for no loss. For display only.

Guarantee: a record is deleted with its call.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES, insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.records import AnswerTraining
from ratchet.store.records.base import row_to

_PAGE = 500  # rows of one statement


class AnswerTrainings:
    """Operations on records of trained answers."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def record(self, round_id: str, answers: Sequence[AnswerTraining]) -> None:
        """Write a round's records, except those of calls that were deleted meanwhile; repeated ones change nothing."""
        rows = [msgspec.structs.asdict(msgspec.structs.replace(one, round_id=round_id)) for one in answers]
        with write(self._engine) as connection:
            for start in range(0, len(rows), _PAGE):
                part = rows[start : start + _PAGE]
                calls = schema.calls.c.id
                there = set(connection.scalars(sa.select(calls).where(calls.in_([row["call_id"] for row in part]))))
                if known := [row for row in part if row["call_id"] in there]:
                    insert_or_ignore(connection, schema.answer_training, known)

    def of_calls(self, call_ids: Sequence[str]) -> list[AnswerTraining]:
        """Return the records of calls, in their order within a call."""
        table = schema.answer_training
        found: list[AnswerTraining] = []
        with read(self._engine) as connection:
            for start in range(0, len(call_ids), MAX_IN_VALUES):
                mine = table.c.call_id.in_(call_ids[start : start + MAX_IN_VALUES])
                rows = connection.execute(sa.select(table).where(mine).order_by(table.c.call_id, table.c.choice))
                found += [row_to(AnswerTraining, row) for row in rows]
        return found
