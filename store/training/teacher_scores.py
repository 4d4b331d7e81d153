"""Teacher scores: the logprobs that a teacher gives the sampled tokens of a trajectory, compressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.records import AnswerLogprobs, TeacherScore

_ANSWERS = msgspec.msgpack.Decoder(tuple[AnswerLogprobs, ...])


def replace_teacher_scores(connection: sa.Connection, scores: Sequence[TeacherScore]) -> None:
    """Store scores in place of earlier ones of the same trajectories."""
    if not scores:
        return
    table = schema.teacher_scores
    names = [one.trajectory_id for one in scores]
    connection.execute(sa.delete(table).where(table.c.trajectory_id.in_(names)))
    rows = [
        {
            "trajectory_id": one.trajectory_id,
            "teacher": one.teacher,
            "answers": zlib.compress(msgspec.msgpack.encode(one.answers)),
        }
        for one in scores
    ]
    connection.execute(sa.insert(table), rows)


def read_teacher_scores(connection: sa.Connection, trajectory_ids: Sequence[str]) -> dict[str, TeacherScore]:
    """Return the scores, by trajectory."""
    table = schema.teacher_scores
    rows = connection.execute(sa.select(table).where(table.c.trajectory_id.in_(list(trajectory_ids))))
    return {
        row.trajectory_id: TeacherScore(
            trajectory_id=row.trajectory_id,
            teacher=row.teacher,
            answers=_ANSWERS.decode(zlib.decompress(row.answers)),
        )
        for row in rows
    }
