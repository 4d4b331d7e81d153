"""Inserts many rows past SQLAlchemy's work for every row: each statement is compiled once, and the driver gets values.

What a column holds is its type's doing, as everywhere else; a row says every column that has no default in the
database, and all rows say the same ones. Errors are SQLAlchemy's, except where a value does not fit its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

Row = dict[str, Any]

_STATEMENTS = 256  # that are remembered: dialects (one per engine) x tables


def insert(connection: sa.Connection, table: sa.Table, rows: Sequence[Row], *, new_only: bool = False) -> None:
    """Insert rows; with `new_only` those whose primary key exists are left as they are."""
    if rows:
        statement = _compiled(connection.dialect, table, tuple(rows[0]), new_only)
        connection.exec_driver_sql(statement.text, statement.values(rows))


class _Statement:
    """An INSERT in a dialect's own words, and what turns rows into its values."""

    def __init__(self, dialect: sa.Dialect, table: sa.Table, columns: Sequence[str], new_only: bool) -> None:
        kinds = postgresql if dialect.name == "postgresql" else sqlite
        statement = kinds.insert(table).on_conflict_do_nothing() if new_only else sa.insert(table)
        compiled = statement.compile(dialect=dialect, column_keys=list(columns))
        self.text = str(compiled)
        self._positional = bool(compiled.positional)
        self._names = tuple(compiled.positiontup or columns)
        self._of = itemgetter(*self._names) if len(self._names) > 1 else lambda row: (row[self._names[0]],)
        types = [table.c[name].type.dialect_impl(dialect) for name in self._names]
        self._packs: list[Callable[[Any], Any] | None] = [kind.bind_processor(dialect) for kind in types]

    def values(self, rows: Sequence[Row]) -> Any:
        """Return the rows as the driver takes them."""
        columns: list[Iterable[Any]] = list(zip(*map(self._of, rows), strict=True))
        for place, pack in enumerate(self._packs):
            if pack is not None:
                columns[place] = map(pack, columns[place])
        packed = zip(*columns, strict=True)
        return list(packed) if self._positional else [dict(zip(self._names, row, strict=True)) for row in packed]


@lru_cache(maxsize=_STATEMENTS)
def _compiled(dialect: sa.Dialect, table: sa.Table, columns: tuple[str, ...], new_only: bool) -> _Statement:
    return _Statement(dialect, table, columns, new_only)
