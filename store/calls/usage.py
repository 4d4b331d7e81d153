"""What keys use: calls and tokens by UTC day, key, agent or model, and purpose. No content.

Guarantees: a call counts once, in the transaction that stores its end, so that the sums of several proxies are right
and outlive restarts. Deleting or pruning trajectories changes no sum. All keys that were not checked count as one, and
a day has one row for each combination that occurred.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import date, timedelta
from functools import cache, lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ratchet.store.db import schema
from ratchet.store.db.bulk import execute_many
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.ids import owner
from ratchet.store.operation_records import KeyTokens, Usage
from ratchet.store.records import CallEnded, row_to
from ratchet.store.states import CallState

DIMENSIONS = ("day", "key_id", "alias", "purpose")
_SUMS = ("calls", "failed", "prompt_tokens", "completion_tokens")
_MAX_ROWS = 10_000
_DAY_SECONDS = 86_400


class UsageVerbs(Verbs):
    """Operations on the usage of keys."""

    def read(
        self,
        days: int,
        by: Collection[str] = DIMENSIONS,
        alias: str | None = None,
        key_id: str | None = None,
        now: float | None = None,
    ) -> list[Usage]:
        """Return the sums of the last `days`, today included, latest day first, then most tokens first.

        `by`: some of `DIMENSIONS`; the others are summed up, and None in the result. At most 10,000 rows.
        """
        table, keys = schema.usage, schema.keys
        names = [table.c[name] for name in DIMENSIONS if name in by]
        sums = [sa.func.sum(table.c[name]).label(name) for name in _SUMS]
        chosen = (table.c.day >= first_day(days, now), matches(table, alias=alias, key_id=key_id))
        order = [one.desc() if one.name == "day" else one for one in names]
        tokens = sa.func.sum(table.c.prompt_tokens + table.c.completion_tokens).desc()
        query = sa.select(*names, *sums).where(*chosen).group_by(*names)
        query = query.order_by(*order[: "day" in by], tokens, *order).limit(_MAX_ROWS)
        if not names:
            query = query.having(sa.func.count() > 0)
        rows = self._rows(query)
        called = {row.id: row.name for row in self._rows(sa.select(keys.c.id, keys.c.name))}
        none = dict.fromkeys(name for name in DIMENSIONS if name not in by)
        return [
            row_to(Usage, row, key_name=called.get(row.key_id) if "key_id" in by else None, **none,
                   **{name: int(getattr(row, name)) for name in _SUMS})
            for row in rows
        ]  # fmt: skip

    def of_keys(self, key_ids: Collection[str], now: float | None = None) -> dict[str, KeyTokens]:
        """Return the tokens of these keys today and this month, by key id; zeros for a key without calls."""
        table, day = schema.usage, first_day(1, now)
        tokens = table.c.prompt_tokens + table.c.completion_tokens
        today = sa.func.sum(sa.case((table.c.day == day, tokens), else_=0))
        query = (
            sa.select(table.c.key_id, today.label("today"), sa.func.sum(tokens).label("this_month"))
            .where(table.c.key_id.in_(list(key_ids)), table.c.day >= f"{day[:7]}-01", table.c.day <= day)
            .group_by(table.c.key_id)
        )
        found = {row.key_id: KeyTokens(day, int(row.today), int(row.this_month)) for row in self._rows(query)}
        return dict.fromkeys(key_ids, KeyTokens(day=day)) | found


def add_usage(connection: sa.Connection, ended: Iterable[CallEnded]) -> None:
    """Add the calls that were stored as ended, in the caller's transaction and as its last statement.

    Rows are locked in one order, and nothing is locked after them: proxies that ship at once do not deadlock.
    """
    sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * len(_SUMS))
    for end in ended:
        row = sums[_place(end)]
        row[0] += 1
        row[1] += end.state in (CallState.REFUSED, CallState.FAILED)
        row[2] += end.prompt_tokens
        row[3] += end.completion_tokens
    if sums:
        rows = [dict(zip((*DIMENSIONS, *_SUMS), (*place, *sums[place]), strict=True)) for place in sorted(sums)]
        execute_many(connection, _upsert(connection.dialect.name), rows)


def first_day(days: int, now: float | None = None) -> str:
    """Return the first of the last `days` UTC days, today included."""
    return _day(int((time.time() if now is None else now) // _DAY_SECONDS) - days + 1)


def _place(end: CallEnded) -> tuple[str, ...]:
    start = end.start
    return (_day(int(end.ended_at // _DAY_SECONDS)), owner(start.key_id)[:64], start.alias[:128], start.purpose)


@lru_cache(maxsize=64)
def _day(number: int) -> str:
    """Return a day by its number since 1970-01-01."""
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


@cache
def _upsert(dialect: str) -> Any:
    table = schema.usage
    insert: Any = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    return insert.on_conflict_do_update(
        index_elements=[table.c[name] for name in DIMENSIONS],
        set_={name: table.c[name] + insert.excluded[name] for name in _SUMS},
    )
