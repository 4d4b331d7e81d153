"""Tool calls and their results, with counts per tool and policy version.

Guarantees: a repeated record or result changes nothing, and only new ones are returned, so that the caller counts each
once. Tool calls are deleted with their call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import execute_many, insert_columns, select_in
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.records import ToolCall, ToolCallCounts, ToolCallResult, row_to
from ratchet.store.states import ToolOutcome

_MAX_COUNTED = 1_000  # the most called tools

_rows = schema.tool_calls
_SET_RESULT = (
    sa.update(_rows)
    .where(_rows.c.call_id == sa.bindparam("of"), _rows.c.choice == sa.bindparam("nth"))
    .where(_rows.c.place == sa.bindparam("at"))
    .values(result=sa.bindparam("new_result"))
)
_KNOWN = sa.select(schema.calls.c.id, _rows.c.choice, _rows.c.place).outerjoin(
    _rows, _rows.c.call_id == schema.calls.c.id
)
_FIELDS = ToolCall.__struct_fields__
_UNANSWERED = (
    sa.select(*(_rows.c[name] for name in _FIELDS))
    .where(_rows.c.result.is_(None))
    .order_by(_rows.c.call_id, _rows.c.choice, _rows.c.place)
)


class ToolCallVerbs(Verbs):
    def toolset(self, name: str) -> bytes | None:
        """Return the canonical JSON of a tool list by its hash."""
        body: bytes | None = self._value(sa.select(schema.toolsets.c.body).where(schema.toolsets.c.hash == name))
        return body

    def record_tool_calls(
        self, found: Sequence[ToolCall], answers: Sequence[ToolCallResult]
    ) -> tuple[list[ToolCall], list[ToolCall]]:
        """Write tool calls, then results of these and of earlier ones; return (new calls, calls with a new result).

        Tool calls of unknown calls are left out. If two processes write the same ones at the same moment, both may
        return them. Raises StoreUnavailable; then nothing was written.
        """
        if not found and not answers:
            return [], []
        with write(self._engine) as connection:
            new = _without_known(connection, found)
            # Another process may write the same ones at once: two ship one journal while a coordinator is replaced.
            columns = {name: [getattr(row, name) for row in new] for name in _FIELDS}
            insert_columns(connection, _rows, columns, new_only=True)
            return new, _answer(connection, answers)

    def of_call(self, call_id: str) -> list[ToolCall]:
        """Return the tool calls of one call, in order."""
        query = sa.select(_rows).where(_rows.c.call_id == call_id).order_by(_rows.c.choice, _rows.c.place)
        return self._records(ToolCall, query)

    def newest_answered(self, alias: str, limit: int) -> list[ToolCall]:
        """Return the newest tool calls of an alias whose result is known, newest first."""
        # coalesce: read in the order of the primary key; the index of the alias would need a sort of all its rows.
        mine = sa.func.coalesce(_rows.c.alias, "") == alias
        order = (_rows.c.call_id.desc(), _rows.c.choice.desc(), _rows.c.place.desc())
        query = sa.select(_rows).where(mine, _rows.c.result.is_not(None)).order_by(*order).limit(limit)
        return self._records(ToolCall, query)

    def counts_by_version(self, alias: str | None = None, version: int | None = None) -> list[ToolCallCounts]:
        """Return the counts per alias, version and tool, the most called first, at most `_MAX_COUNTED`."""
        names = (_rows.c.alias, _rows.c.version, _rows.c.tool)
        by = (*names, _rows.c.outcome, _rows.c.result)
        query = sa.select(*by, sa.func.count().label("n")).where(matches(_rows, alias=alias, version=version))
        outcomes: defaultdict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)
        results: defaultdict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)
        for alias_of, version_of, tool, outcome, result, count in self._rows(query.group_by(*by)):
            key = (alias_of, version_of, tool)
            outcomes[key][outcome] += count
            if result is not None:
                results[key][result] += count
        tallies = [
            ToolCallCounts(*key, calls=counts.total(), outcomes=dict(counts), results=dict(results[key]))
            for key, counts in outcomes.items()
        ]
        return sorted(tallies, key=lambda tally: (-tally.calls, tally.alias, tally.version, tally.tool))[:_MAX_COUNTED]


def tool_calls_of(connection: sa.Connection, trajectory_id: str) -> tuple[ToolCall, ...]:
    """Return the tool calls of a trajectory, in order."""
    calls = schema.calls
    query = sa.select(_rows).join(calls, calls.c.id == _rows.c.call_id).where(calls.c.trajectory_id == trajectory_id)
    order = (_rows.c.call_id, _rows.c.choice, _rows.c.place)
    return tuple(row_to(ToolCall, row) for row in connection.execute(query.order_by(*order)))


def _without_known(connection: sa.Connection, found: Sequence[ToolCall]) -> list[ToolCall]:
    """Return the tool calls that are new and whose call is stored."""
    names = sorted({row.call_id for row in found})
    if not names:
        return []
    known = set(map(tuple, select_in(connection, _KNOWN, schema.calls.c.id, names)))
    there = {key[0] for key in known}
    new = {(row.call_id, row.choice, row.place): row for row in found if row.call_id in there}
    return [row for key, row in new.items() if key not in known]


def _answer(connection: sa.Connection, answers: Sequence[ToolCallResult]) -> list[ToolCall]:
    wanted = {(answer.call_id, answer.choice, answer.tool_call_id): answer.result for answer in answers}
    names = sorted({answer.call_id for answer in answers})
    answered = []
    for row in select_in(connection, _UNANSWERED, _rows.c.call_id, names) if names else ():
        result = wanted.pop((row.call_id, row.choice, row.tool_call_id), None)
        if result is not None:
            fields = dict(zip(_FIELDS, row, strict=True)) | {"outcome": ToolOutcome(row.outcome), "result": result}
            answered.append(ToolCall(**fields))
    values = [{"of": row.call_id, "nth": row.choice, "at": row.place, "new_result": row.result} for row in answered]
    execute_many(connection, _SET_RESULT, values)
    return answered
