"""Job progress: how far each long phase of a trainer is, one row per alias and phase. For display only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import execute_many, insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.records.base import Record, row_to

_VALUES = ("done", "total", "seconds", "means", "ended", "updated_at")  # columns that change


class ProgressRate:
    """Pace and remaining time of a phase with `done` of `total` items after `seconds`."""

    __slots__ = ()
    done: float
    total: float
    seconds: float

    @property
    def seconds_per_item(self) -> float | None:
        """Mean seconds per item so far; None before the first one."""
        return self.seconds / self.done if self.done else None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the total at this pace; None before the first item."""
        each = self.seconds_per_item
        return None if each is None else each * max(0.0, self.total - self.done)


class JobProgress(Record, ProgressRate, frozen=True):
    """Progress of a phase at `updated_at`; `seconds` since its start; `means` by metric."""

    alias: str
    phase: str
    done: float
    total: float
    seconds: float
    means: Mapping[str, float]
    ended: bool
    updated_at: float


class JobProgressVerbs:
    """Operations on job progress."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def update(self, progress: Sequence[JobProgress]) -> None:
        """Replace the progress of some phases, in one transaction."""
        rows = [msgspec.structs.asdict(one) | {"means": dict(one.means)} for one in progress]
        new = [{"of": row["alias"], "named": row["phase"]} | {f"new_{n}": row[n] for n in _VALUES} for row in rows]
        table = schema.job_progress
        mine = sa.and_(table.c.alias == sa.bindparam("of"), table.c.phase == sa.bindparam("named"))
        change = sa.update(table).where(mine).values({name: sa.bindparam(f"new_{name}") for name in _VALUES})
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, rows)
            execute_many(connection, change, new)

    def all(self, alias: str | None = None) -> list[JobProgress]:
        """Return the progress of one alias or of all, the latest update first."""
        query = sa.select(schema.job_progress).where(
            sa.true() if alias is None else schema.job_progress.c.alias == alias
        )
        with read(self._engine) as connection:
            rows = connection.execute(query.order_by(schema.job_progress.c.updated_at.desc())).all()
        return [row_to(JobProgress, row) for row in rows]
