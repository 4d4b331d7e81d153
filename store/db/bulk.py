"""Many rows past SQLAlchemy's work for each: a statement is compiled once, and the driver gets values.

What a column holds is its type's doing, as everywhere else; a row says every column that has no default in the
database, and all rows say the same ones. Errors are SQLAlchemy's, except where a value does not fit its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

Row = dict[str, Any]

_STATEMENTS = 256  # that are remembered: dialects (one per engine) x tables


def insert(connection: sa.Connection, table: sa.Table, rows: Sequence[Row], *, new_only: bool = False) -> int:
    """Insert rows, return how many; with `new_only` those whose primary key exists are left as they are."""
    return insert_columns(connection, table, _columns(rows), new_only=new_only)


def insert_columns(
    connection: sa.Connection, table: sa.Table, columns: Mapping[str, Sequence[Any]], *, new_only: bool = False
) -> int:
    """Insert rows that are given column by column, as `insert` does."""
    if not columns or not next(iter(columns.values())):
        return 0
    statement = _compiled(connection.dialect, table, tuple(columns), new_only)
    return connection.exec_driver_sql(statement.text, statement.values(columns)).rowcount


def in_values(connection: sa.Connection, column: sa.Column[str], names: Sequence[str]) -> sa.ColumnElement[bool]:
    """Return that a text column is one of many names, in a statement whose words do not depend on how many."""
    if connection.dialect.name == "postgresql":
        return column == sa.any_(sa.bindparam(None, names, sa.ARRAY(sa.String)))
    listed = sa.func.json_each(sa.bindparam(None, names, sa.JSON)).table_valued("value")
    return column.in_(sa.select(listed.c.value))


def execute_many(connection: sa.Connection, statement: sa.Update, rows: Sequence[Row]) -> None:
    """Execute an UPDATE once per row. It names its values by `bindparam`; it is compiled once if it is always the same.

    A parameter must not have the name of a column.
    """
    if rows:
        compiled = _compiled_change(connection.dialect, statement)
        connection.exec_driver_sql(compiled.text, compiled.values(_columns(rows)))


def _columns(rows: Sequence[Row]) -> dict[str, Sequence[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


class _Statement:
    """A statement in a dialect's own words, and what turns rows into its values."""

    def __init__(self, dialect: sa.Dialect, statement: sa.Insert | sa.Update, columns: Sequence[str] | None) -> None:
        compiled: Any = statement.compile(dialect=dialect, column_keys=None if columns is None else list(columns))
        self.text = str(compiled)
        self._positional = bool(compiled.positional)
        self._names = tuple(compiled.positiontup or compiled.binds)
        types = [compiled.binds[name].type.dialect_impl(dialect) for name in self._names]
        self._packs: list[Callable[[Any], Any] | None] = [kind.bind_processor(dialect) for kind in types]

    def values(self, columns: Mapping[str, Sequence[Any]]) -> Any:
        """Return the rows as the driver takes them."""
        said: list[Iterable[Any]] = [columns[name] for name in self._names]
        packed = zip(
            *(map(pack, one) if pack else one for pack, one in zip(self._packs, said, strict=True)), strict=True
        )
        return list(packed) if self._positional else [dict(zip(self._names, row, strict=True)) for row in packed]


@lru_cache(maxsize=_STATEMENTS)
def _compiled(dialect: sa.Dialect, table: sa.Table, columns: tuple[str, ...], new_only: bool) -> _Statement:
    kinds = postgresql if dialect.name == "postgresql" else sqlite
    statement = kinds.insert(table).on_conflict_do_nothing() if new_only else sa.insert(table)
    return _Statement(dialect, statement, columns)


@lru_cache(maxsize=_STATEMENTS)
def _compiled_change(dialect: sa.Dialect, statement: sa.Update) -> _Statement:
    return _Statement(dialect, statement, None)


def insert_or_ignore(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> int:
    """Insert rows, leaving those whose primary key exists as they are; return how many are new."""
    return insert(connection, table, rows, new_only=True)


MAX_IN_VALUES = 500  # values in one IN (...)
