"""Naming of constraints, and the column types of ids, times and states."""

from __future__ import annotations

from enum import StrEnum

import sqlalchemy as sa

from ratchet.store.db.column_types import Hash

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ID = sa.String(40)
# Compared by bytes in every locale, so that ids sort by time and pages follow ids.
CALL_ID = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
TRAJECTORY_ID = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
HASH = Hash
TIME: sa.Double[float] = sa.Double()
JSON = sa.JSON()
TASK_ID = sa.String(256)


def enum_constraint(column: str, states: type[StrEnum]) -> sa.CheckConstraint:
    """Return the constraint that a column has one of these states."""
    listed = ", ".join(f"'{state}'" for state in states)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=f"{column}_known")


def index_when_set(table: sa.Table, *columns: str) -> None:
    """Index the rows in which the first of these columns is not null."""
    is_set = table.c[columns[0]].is_not(None)
    name = "_".join(("ix", table.name, *columns))
    sa.Index(name, *(table.c[column] for column in columns), sqlite_where=is_set, postgresql_where=is_set)
