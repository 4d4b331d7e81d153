"""Tasks: the rows of task sets that rollouts were made of, so that judges and reports find the row by its id.

A task's id is made of its content by whoever opens the set; a row that is known stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES, insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidRecord
from ratchet.store.records.base import row_to
from ratchet.store.records.tuning import TaskRow

TASK_ID = sa.String(256)


class Tasks:
    """Operations on tasks."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def register(self, rows: Iterable[TaskRow]) -> None:
        """Record what is not known yet. Raises InvalidRecord."""
        waiting = iter(rows)
        while some := [_checked(row) for row in islice(waiting, MAX_IN_VALUES)]:
            with write(self._engine) as connection:
                insert_or_ignore(connection, schema.tasks, some)

    def get(self, task_id: str) -> TaskRow | None:
        """Return one task's row; None if it is not known."""
        with read(self._engine) as connection:
            row = connection.execute(sa.select(schema.tasks).where(schema.tasks.c.id == task_id)).one_or_none()
        return None if row is None else row_to(TaskRow, row)


def row_of(connection: sa.Connection, task_id: str | None) -> Mapping[str, Any] | None:
    """Return the row that a task key names; None if it names none."""
    if task_id is None:
        return None
    row: Mapping[str, Any] | None = connection.scalar(
        sa.select(schema.tasks.c.content).where(schema.tasks.c.id == task_id)
    )
    return row


def _checked(task: TaskRow) -> dict[str, Any]:
    if not 0 < len(task.id) <= 256:
        raise InvalidRecord(f"the task id {task.id[:40]!r}... has {len(task.id)} characters: use 1 to 256")
    return {"id": task.id, "task_set": task.task_set, "split": task.split, "content": dict(task.content)}
