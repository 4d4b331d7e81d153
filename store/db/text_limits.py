"""Text that fits its column: cut to what that holds, and without what PostgreSQL's texts cannot hold.

What agents and upstreams choose may be of any length; no database refuses a row for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa


def truncate_row(table: sa.Table, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with every text cut to its column."""
    return {name: values[0] for name, values in truncate_columns(table, {key: (row[key],) for key in row}).items()}


def truncate_columns(table: sa.Table, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return columns of rows so that each text fits; a column whose texts all fit is not gone through."""
    fit = dict(columns)
    for name, length in _texts(table):
        said = [value for value in fit.get(name, ()) if value is not None]
        if said and (max(map(len, said)) > length or "\0" in "".join(said)):
            fit[name] = [None if value is None else value.replace("\0", "\ufffd")[:length] for value in fit[name]]
    return fit


@cache
def _texts(table: sa.Table) -> tuple[tuple[str, int], ...]:
    """Return the columns that hold text, each with the most characters that it takes."""
    return tuple((c.name, c.type.length or sys.maxsize) for c in table.c if isinstance(c.type, sa.String))
