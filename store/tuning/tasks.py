"""Tasks: the rows of task sets with rollouts, which judges and reports find by id.

The reader of a task set derives the id of a task from its content.
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


class TaskRows:
    """Operations on tasks."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def register(self, rows: Iterable[TaskRow]) -> None:
        """Store tasks; known ids are ignored. Raises InvalidRecord."""
        remaining = iter(rows)
        while some := [_checked(row) for row in islice(remaining, MAX_IN_VALUES)]:
            with write(self._engine) as connection:
                insert_or_ignore(connection, schema.tasks, some)

    def get(self, task_id: str) -> TaskRow | None:
        """Return a task; None if it is unknown."""
        with read(self._engine) as connection:
            row = connection.execute(sa.select(schema.tasks).where(schema.tasks.c.id == task_id)).one_or_none()
        return None if row is None else row_to(TaskRow, row)


def row_of(connection: sa.Connection, task_id: str | None) -> Mapping[str, Any] | None:
    """Return the row of a task key; None if it is unknown."""
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
