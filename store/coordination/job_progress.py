"""Works: how far each long work of a trainer is, for whoever watches from elsewhere. One row per alias and work.

Figures only, of no use to anything but the eye: whoever writes may leave some out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import sqlalchemy as sa

from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.db.table_types import JSON, TIME, metadata
from ratchet.store.records.base import Record

# A work of an alias stands here once: as it was told last.
works = sa.Table(
    "works",
    metadata,
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("work", sa.String(32), primary_key=True),
    sa.Column("done", sa.Double, nullable=False),
    sa.Column("total", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("means", JSON, nullable=False),
    sa.Column("ended", sa.Boolean, nullable=False),
    sa.Column("noted_at", TIME, nullable=False),
)


class ProgressRate:
    """What can be told of work from how far it is: `done` of `total`, `seconds` since it began."""

    __slots__ = ()
    done: float
    total: float
    seconds: float

    @property
    def seconds_per_item(self) -> float | None:
        """Seconds that an item took so far; None before the first one."""
        return self.seconds / self.done if self.done else None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the total at this pace; None before the first item."""
        each = self.seconds_per_item
        return None if each is None else each * max(0.0, self.total - self.done)


class JobProgress(Record, ProgressRate, frozen=True):
    """How far a work was at `noted_at`: `seconds` since it began; `means` by metric, each over its own rows."""

    alias: str
    work: str
    done: float
    total: float
    seconds: float
    means: Mapping[str, float]
    ended: bool
    noted_at: float


class Works:
    """The verbs over works."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def note(
        self, alias: str, work: str, *, done: float, total: float, seconds: float, means: Mapping[str, float],
        ended: bool = False,
    ) -> None:  # fmt: skip
        """Write down how far a work is, in place of what was written before."""
        told = {"done": done, "total": total, "seconds": seconds, "means": dict(means), "ended": ended}
        row = {**told, "noted_at": time.time()}
        with write(self._engine) as connection:
            insert_or_ignore(connection, works, [{"alias": alias, "work": work, **row}])
            mine = sa.and_(works.c.alias == alias, works.c.work == work)
            connection.execute(sa.update(works).where(mine).values(**row))

    def all(self, alias: str | None = None) -> list[JobProgress]:
        """Return the works of one alias or of all, the latest told first."""
        query = sa.select(works).where(sa.true() if alias is None else works.c.alias == alias)
        with read(self._engine) as connection:
            rows = connection.execute(query.order_by(works.c.noted_at.desc())).all()
        return [JobProgress(**{name: getattr(row, name) for name in JobProgress.__struct_fields__}) for row in rows]
