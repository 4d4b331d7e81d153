"""Reads calls with the messages and tools that they name, and writes those that the proxy ships."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.feedback import add, attach_pending_feedback, lock_feedback_order
from ratchet.store.calls.shipping import Blocks, message_path, ship
from ratchet.store.calls.usage import add_usage
from ratchet.store.content.messages import ROOT, SYSTEM_ROLES, conversation_range, parents_first
from ratchet.store.db import schema
from ratchet.store.db.bulk import in_values
from ratchet.store.db.column_types import NOT_DECODED
from ratchet.store.db.engine import read, write
from ratchet.store.db.schema import SHARED_PARENT
from ratchet.store.db.verbs import MAX_PAGE, Verbs, chunks, matches
from ratchet.store.errors import RecordDamaged, RecordNotFound
from ratchet.store.records import Call, Choice, Feedback, Shipment, row_to
from ratchet.store.states import CallState

# Reads the messages and tools that calls name by hash, and finds trajectories in which some are missing.

_T = TypeVar("_T")


def load_path(connection: sa.Connection, leaf: str) -> tuple[Mapping[str, Any], ...]:
    """Return the messages from the root to `leaf`. Raises RecordDamaged."""
    path = message_path(leaf, "body")
    bodies = connection.scalars(sa.select(path.c.body).order_by(path.c.distance.desc()))
    return tuple(_decode(body, dict[str, Any]) for body in bodies)


def system_prompt(connection: sa.Connection, leaf: str) -> str:
    """Return the system prompt at the start of the path to a message, or an empty text."""
    table, path = schema.messages, message_path(leaf, "hash")
    first = sa.select(path.c.hash).where(path.c.parent == ROOT).scalar_subquery()
    body = connection.scalar(sa.select(table.c.body).where(table.c.hash == first))
    message = _decode(body, dict[str, Any]) if body else {}
    if message.get("role") not in SYSTEM_ROLES:
        return ""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content)


def load_tools(connection: sa.Connection, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return a tool list by its hash, or an empty one."""
    if not name:
        return ()
    body = connection.scalar(sa.select(schema.toolsets.c.body).where(schema.toolsets.c.hash == name))
    return tuple(_decode(body, list[dict[str, Any]])) if body else ()


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except NOT_DECODED as error:
        raise RecordDamaged(f"a stored message or tool list is damaged ({error})") from error


def unnamed_messages(connection: sa.Connection, names: Sequence[str]) -> dict[str, str]:
    """Return those of these messages that no call, answer or message names, each with its parent."""
    table, calls, choices = schema.messages, schema.calls, schema.choices
    found = sa.select(table.c.hash, table.c.parent).where(
        table.c.hash.in_(names),
        ~sa.exists().where(calls.c.retained_node == table.c.hash),
        ~sa.exists().where(choices.c.reply_node == table.c.hash),
    )
    parents = {row.hash: row.parent for row in connection.execute(found)}
    return {name: parents[name] for name in without_followers(connection, parents)}


def without_followers(connection: sa.Connection, names: Iterable[str]) -> set[str]:
    """Return those of these messages that are no stored message's parent."""
    table = schema.messages
    conversations: dict[tuple[str, str] | None, list[str]] = {}
    for name in names:
        conversations.setdefault(conversation_range(name), []).append(name)
    left: set[str] = set()
    for limits, own in conversations.items():
        near = SHARED_PARENT[connection.dialect.name] if limits is None else table.c.hash.between(*limits)
        for some in chunks(own):
            query = sa.select(table.c.parent).where(near, table.c.parent.in_(some)).distinct()
            left |= set(some).difference(connection.scalars(query))
    return left


def incomplete(connection: sa.Connection, trajectory_ids: Sequence[str]) -> set[str]:
    """Return the trajectories with missing messages or tools.

    A damaged or deleted journal segment causes this. Messages are named by content, so a later request that repeats
    them fills the gap.
    """
    if not trajectory_ids:
        return set()
    calls, messages, toolsets = schema.calls, schema.messages, schema.toolsets
    ours = in_values(connection, calls.c.trajectory_id, list(trajectory_ids))
    prompts = sa.select(calls.c.trajectory_id.label("run"), calls.c.prompt_node.label("hash"))
    path = prompts.where(ours, calls.c.prompt_node != ROOT).cte("path", recursive=True)
    above = sa.select(path.c.run, messages.c.parent).join(messages, messages.c.hash == path.c.hash)
    path = path.union(above.where(messages.c.parent != ROOT))
    cut = sa.select(path.c.run).where(~sa.exists().where(messages.c.hash == path.c.hash))
    bare = sa.select(calls.c.trajectory_id).where(
        ours, calls.c.tools_hash != "", ~sa.exists().where(toolsets.c.hash == calls.c.tools_hash)
    )
    return {*connection.scalars(cut), *connection.scalars(bare)}


# Calls, shipped by the proxy.
#
# Guarantees: shipping is idempotent by call id, with one transaction per batch (shipping.py).

_TOKEN_COLUMNS = ("prompt_blocks", "prompt_ids", "token_ids", "logprobs")


class Calls(Verbs):
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
