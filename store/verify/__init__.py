"""Verification of a store: recomputes every hash and checks every invariant. Reads only.

It reads in pages, in the order of the primary keys, each page from one snapshot. So memory stays bounded, a running
project is not disturbed, and concurrent changes are seen completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import connect, ensure_schema, read
from ratchet.store.verify import check_calls, check_messages, check_training, check_tuning
from ratchet.store.verify.violation import Page, Violation, undecoded

_MAX_KEPT = 1_000  # violations
_NOT_JSON = "restore this row from a backup; until then what needs it is refused, or dropped as `damaged`"
OnProgress = Callable[[str, int, int], None]  # table, rows checked now, rows in total

# Table, key, page size and check.
_CHECKS: tuple[tuple[sa.Table, str, int, Callable[[sa.Connection, Page], Iterator[Violation]]], ...] = (
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
    """The number of checked rows, and the violations; only the first thousand are kept."""

    rows: dict[str, int] = field(default_factory=dict)  # checked rows by table
    findings: list[Violation] = field(default_factory=list)
    count: int = 0  # all violations, including those not kept

    @property
    def sound(self) -> bool:
        """Whether there is no violation."""
        return self.count == 0

    def add(self, finding: Violation) -> None:
        """Add a violation."""
        self.count += 1
        if len(self.findings) < _MAX_KEPT:
            self.findings.append(finding)


def verify(store_url: str, on_progress: OnProgress = lambda table, rows, total: None) -> VerificationReport:
    """Verify a store; `on_progress` is called for each page. Raises StoreError if the database cannot be read."""
    engine = connect(store_url, create=False)
    report = VerificationReport()
    try:
        ensure_schema(engine)
        for finding in _check_file(engine):
            report.add(finding)
        with read(_with_snapshots(engine)) as connection:  # one row per version: few
            for finding in check_tuning.check_policies(connection):
                report.add(finding)
        for table, key, size, check in _CHECKS:
            report.rows[table.name] = 0
            for found, checked, total in _check_table(engine, table, table.c[key], size, check):
                report.rows[table.name] += checked
                for finding in found:
                    report.add(finding)
                on_progress(table.name, checked, total)
    finally:
        engine.dispose()
    return report


def _check_table(
    engine: sa.Engine,
    table: sa.Table,
    key: sa.Column[str],
    size: int,
    check: Callable[[sa.Connection, Page], Iterator[Violation]],
) -> Iterator[tuple[list[Violation], int, int]]:
    """Yield, by page, the violations, the number of rows checked, and the total."""
    columns = undecoded(table)
    snapshots, last = _with_snapshots(engine), None
    with read(snapshots) as connection:
        total = int(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0)
    while True:
        query = sa.select(*columns).order_by(key).limit(size)
        with read(snapshots) as connection:
            page = connection.execute(query if last is None else query.where(key > last)).all()
            found = list(check(connection, page)) if page else []
        yield found, len(page), total
        if len(page) < size:
            return
        last = getattr(page[-1], key.name)


def _with_snapshots(engine: sa.Engine) -> sa.Engine:
    """Return an engine whose transactions read one snapshot, as SQLite's always do."""
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level="REPEATABLE READ")


def _check_file(engine: sa.Engine) -> Iterator[Violation]:
    """Yield problems of SQLite's file, dangling references, and values that are not JSON; PostgreSQL prevents all."""
    if engine.dialect.name != "sqlite":
        return
    remedy = "restore the store from a backup, or rebuild it: sqlite3 store.db .recover | sqlite3 new.db"
    with read(engine) as connection:
        for (problem,) in connection.exec_driver_sql("PRAGMA quick_check(20)"):
            if problem != "ok":
                yield Violation(row="the database file", problem=str(problem), remedy=remedy)
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MAX_KEPT):
            yield Violation(
                row=f"{table} rowid {row}",
                problem=f"refers to a missing row of {parent}",
                remedy=f"restore {parent} from a backup, or delete this row",
            )
        for table in schema.metadata.sorted_tables:
            yield from _check_json(connection, table)


def _check_json(connection: sa.Connection, table: sa.Table) -> Iterator[Violation]:
    wrong = {
        column.name: sa.and_(column.is_not(None), sa.func.json_valid(sa.type_coerce(column, sa.Text)) == 0)
        for column in table.c
        if isinstance(column.type, sa.JSON)
    }
    if not wrong:
        return
    key = len(table.primary_key)
    query = sa.select(*table.primary_key, *wrong.values()).where(sa.or_(*wrong.values())).limit(_MAX_KEPT)
    for row in connection.execute(query):
        for name, is_wrong in zip(wrong, row[key:], strict=True):
            if is_wrong:
                yield Violation(
                    row=" ".join((table.name, *map(str, row[:key]))),
                    problem=f"its {name} is not JSON",
                    remedy=_NOT_JSON,
                )
