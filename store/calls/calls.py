"""Calls, shipped by the proxy.

Guarantees: shipping is idempotent by call id, with one transaction per batch (shipping.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.calls.feedback import add, attach_pending_feedback, lock_feedback_order
from ratchet.store.calls.prompt_blocks import Blocks
from ratchet.store.calls.shipping import ship
from ratchet.store.calls.usage import add_usage
from ratchet.store.content.messages import parents_first
from ratchet.store.db import schema
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import MAX_PAGE, Verbs, chunks, matches
from ratchet.store.errors import RecordDamaged, RecordNotFound
from ratchet.store.records import Call, Choice, Feedback, Shipment, row_to
from ratchet.store.states import CallState

_TOKEN_COLUMNS = ("prompt_blocks", "prompt_ids", "token_ids", "logprobs")


class Calls(Verbs):
    """Operations on calls."""

    def ship(self, records: Sequence[Shipment]) -> None:
        """Write a batch of starts, ends and feedback; repeated records change nothing.

        Raises StoreUnavailable; then nothing of the batch was written.
        """
        calls = [record for record in records if not isinstance(record, Feedback)]
        feedback = [record for record in records if isinstance(record, Feedback)]
        with write(self._engine) as connection:
            lock_feedback_order(connection, feedback=bool(feedback))
            ended = ship(connection, calls) if calls else ()
            if calls:
                attach_pending_feedback(connection, calls)
            add(connection, feedback)
            add_usage(connection, ended)

    def mark_interrupted(self, call_ids: Iterable[str]) -> None:
        """Mark calls whose proxy died before their end; finished calls stay as they are."""
        started = sa.update(schema.calls).where(matches(schema.calls, id=list(call_ids), state=CallState.STARTED))
        self._change(started.values(state=CallState.INTERRUPTED, untrainable="interrupted"))

    def read(self, call_id: str) -> Call:
        """Return one call with its tokens. Raises RecordNotFound."""
        for found in self.read_with_tokens([call_id]).values():
            return found
        raise RecordNotFound(f"no call {call_id}")

    def check_known(self, call_id: str) -> None:
        """Raise RecordNotFound if there is no such call."""
        if self._value(sa.select(schema.calls.c.id).where(schema.calls.c.id == call_id)) is None:
            raise RecordNotFound(f"no call {call_id}")

    def page(
        self,
        limit: int = 100,
        before: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
        alias: str | None = None,
        *,
        tokens: bool = True,
    ) -> list[Call]:
        """Return at most `limit` calls older than the call id `before`, newest first (ids sort by time).

        With `tokens` False, token ids and logprobs are not read and are empty.
        """
        table = schema.calls
        mine = matches(table, trajectory_id=trajectory or None, state=state or None, alias=alias or None)
        chosen = sa.select(table.c.id).where(mine).order_by(table.c.id.desc()).limit(min(limit, MAX_PAGE))
        if before:
            chosen = chosen.where(table.c.id < before)
        if state and state != CallState.ANSWERED:
            chosen = chosen.where(table.c.state != sa.literal_column("'answered'"))  # the condition of a partial index
        with read(self._engine) as connection:
            found = load_calls(connection, table.c.id.in_(chosen.subquery().select()), tokens=tokens)
        return sorted(found, key=lambda call: call.id, reverse=True)

    def read_with_tokens(self, call_ids: Sequence[str]) -> dict[str, Call]:
        """Return calls with their tokens, by id; unknown ids are left out."""
        with read(self._engine) as connection:
            return {call.id: call for call in load_calls(connection, schema.calls.c.id.in_(call_ids))}


def load_calls(connection: sa.Connection, where: sa.ColumnElement[bool], *, tokens: bool = True) -> list[Call]:
    """Return the matching calls with their choices, oldest first, but none before its parent.

    Without `tokens`, token fields are empty.
    """
    columns, answered = (_columns(table, tokens) for table in (schema.calls, schema.choices))
    by_time = sa.select(*columns).where(where).order_by(schema.calls.c.started_at, schema.calls.c.id)
    rows = parents_first(connection.execute(by_time).all())
    answers: dict[str, list[Choice]] = {}
    for names in chunks([row.id for row in rows]):
        found = sa.select(*answered).where(schema.choices.c.call_id.in_(names)).order_by(schema.choices.c.choice)
        for answer in connection.execute(found):
            answers.setdefault(answer.call_id, []).append(_choice(answer))
    prompts = Blocks(connection, rows)
    return [
        row_to(Call, row, choices=tuple(answers.get(row.id, ())), prompt_ids=prompts.full_prompt(row)) for row in rows
    ]


def _columns(table: sa.Table, tokens: bool) -> list[sa.ColumnElement[Any]]:
    """Return a table's columns; without `tokens`, empty bytes in place of token columns."""
    return [
        sa.literal(b"").label(column.name) if column.name in _TOKEN_COLUMNS and not tokens else column
        for column in table.c
    ]


def _choice(row: Any) -> Choice:
    if len(row.logprobs) % 4:
        raise RecordDamaged(f"the logprobs of an answer to call {row.call_id} are cut off")
    return row_to(Choice, row, index=row.choice, tool_call_ids=tuple(row.tool_call_ids))
