"""Verification: every hash derived again, every invariant looked at; each finding names its row and the remedy.

Reads only, a page at a time in the order of the primary keys, each page at one point in time: memory stays bounded and
a running project is not disturbed. What is deleted or written meanwhile is either seen whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import connect, ensure_schema, read
from ratchet.store.verify import check_calls, check_messages, check_training, check_tuning
from ratchet.store.verify.violation import Page, Violation, undecoded

_MOST_KEPT = 1_000  # findings
OnProgress = Callable[[str, int, int], None]  # table, rows looked at now, rows in all

# What is walked, page by page: the table, its key, how many rows at once, and what looks at them.
_WALKS: tuple[tuple[sa.Table, str, int, Callable[[sa.Connection, Page], Iterator[Violation]]], ...] = (
    (schema.messages, "hash", 1_000, check_messages.check_messages),
    (schema.toolsets, "hash", 200, check_messages.check_toolsets),
    (schema.calls, "id", 200, check_calls.check_calls),
    (schema.trajectories, "id", 500, check_training.check_trajectories),
    (schema.groups, "id", 200, check_training.check_groups),
    (schema.verdicts, "id", 500, check_training.check_verdicts),
    (schema.rounds, "id", 500, check_training.check_rounds),
    (schema.prompts, "id", 200, check_tuning.check_prompts),
    (schema.rollouts, "id", 500, check_tuning.check_rollouts),
    (schema.resamples, "id", 500, check_tuning.check_resamples),
)


@dataclass(slots=True)
class VerificationReport:
    """What was looked at and what was found; of many findings the first thousand are kept."""

    rows: dict[str, int] = field(default_factory=dict)  # looked at, by table
    findings: list[Violation] = field(default_factory=list)
    count: int = 0  # of findings, those that are not kept as well

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return self.count == 0

    def add(self, finding: Violation) -> None:
        """Take one finding in."""
        self.count += 1
        if len(self.findings) < _MOST_KEPT:
            self.findings.append(finding)


def verify(store_url: str, on_progress: OnProgress = lambda table, rows, total: None) -> VerificationReport:
    """Look at everything; `on_progress` hears of progress. Raises StoreError where the database cannot be read."""
    engine = connect(store_url, create=False)
    report = VerificationReport()
    try:
        ensure_schema(engine)
        for finding in _file(engine):
            report.add(finding)
        with read(_still(engine)) as connection:  # one row per version: few
            for finding in check_tuning.check_policies(connection):
                report.add(finding)
        for table, key, size, check in _WALKS:
            report.rows[table.name] = 0
            for found, looked_at, total in _walk(engine, table, table.c[key], size, check):
                report.rows[table.name] += looked_at
                for finding in found:
                    report.add(finding)
                on_progress(table.name, looked_at, total)
    finally:
        engine.dispose()
    return report


def _walk(
    engine: sa.Engine,
    table: sa.Table,
    key: sa.Column[str],
    size: int,
    check: Callable[[sa.Connection, Page], Iterator[Violation]],
) -> Iterator[tuple[list[Violation], int, int]]:
    """Yield, page by page, what was found, how many rows were looked at, and how many there are."""
    columns = undecoded(table)
    still, last = _still(engine), None
    with read(still) as connection:
        total = int(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0)
    while True:
        query = sa.select(*columns).order_by(key).limit(size)
        with read(still) as connection:
            page = connection.execute(query if last is None else query.where(key > last)).all()
            found = list(check(connection, page)) if page else []
        yield found, len(page), total
        if len(page) < size:
            return
        last = getattr(page[-1], key.name)


def _still(engine: sa.Engine) -> sa.Engine:
    """Return an engine whose transactions see one point in time; SQLite's do anyway."""
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level="REPEATABLE READ")


def _file(engine: sa.Engine) -> Iterator[Violation]:
    """What SQLite finds of its own file, and rows that refer to none. PostgreSQL holds these by itself."""
    if engine.dialect.name != "sqlite":
        return
    remedy = "restore the store from a backup, or rebuild it: sqlite3 store.db .recover | sqlite3 new.db"
    with read(engine) as connection:
        for (problem,) in connection.exec_driver_sql("PRAGMA quick_check(20)"):
            if problem != "ok":
                yield Violation(row="the database file", problem=str(problem), remedy=remedy)
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MOST_KEPT):
            yield Violation(
                row=f"{table} rowid {row}",
                problem=f"refers to a row of {parent} that is not there",
                remedy=f"restore {parent} from a backup, or delete this row",
            )
