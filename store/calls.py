"""Calls: shipped in by the proxy, read by everyone.

Promises: shipping is idempotent by call id and one transaction per batch; a call that arrives after its trajectory
was sealed opens a successor trajectory, so that nothing is lost and nothing is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from store import schema
from store.database import read, write
from store.errors import UnknownRecord
from store.records import Call, CallBegun, CallEnded, Choice, MessageNode, OpenLeaf, Shipment
from store.states import CallState, TrajectoryState
from store.tokens import sequences

_PAGE_MOST = 1000


class Calls:
    """The verbs over calls and the messages they carry."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def ship(self, records: Sequence[Shipment]) -> None:
        """Write a batch of beginnings and ends; repeating any of them changes nothing.

        Raises StoreUnavailable, in which case nothing of the batch was written.
        """
        with write(self._engine) as connection:
            _add_messages(connection, records)
            for record in records:
                if isinstance(record, CallBegun):
                    _begin(connection, record)
                else:
                    _begin(connection, record.begun)
                    _end(connection, record)

    def interrupt(self, call_ids: Iterable[str]) -> None:
        """Mark calls whose proxy died before their end; calls that have an end stay as they are."""
        with write(self._engine) as connection:
            connection.execute(
                sa.update(schema.calls)
                .where(schema.calls.c.id.in_(list(call_ids)), schema.calls.c.state == CallState.BEGUN)
                .values(state=CallState.INTERRUPTED, untrainable="interrupted")
            )

    def read(self, call_id: str) -> Call:
        """Return one call with its tokens. Raises UnknownRecord."""
        with read(self._engine) as connection:
            found = load_calls(connection, schema.calls.c.id == call_id)
        if not found:
            raise UnknownRecord(f"no call {call_id}")
        return found[0]

    def page(
        self,
        limit: int = 100,
        before: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
    ) -> list[Call]:
        """Return at most `limit` calls, newest first, older than the call id `before` (ids sort by time)."""
        table = schema.calls
        chosen = sa.select(table.c.id).order_by(table.c.id.desc()).limit(min(limit, _PAGE_MOST))
        if before:
            chosen = chosen.where(table.c.id < before)
        if trajectory:
            chosen = chosen.where(table.c.trajectory_id == trajectory)
        if state:
            chosen = chosen.where(table.c.state == state)
        with read(self._engine) as connection:
            found = load_calls(connection, table.c.id.in_(chosen.subquery().select()))
        return sorted(found, key=lambda call: call.id, reverse=True)

    def message_count(self) -> int:
        """Return how many distinct messages are stored."""
        with read(self._engine) as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(schema.messages)) or 0)

    def open_leaves(self, since: float, limit: int = 10_000) -> list[OpenLeaf]:
        """Return the answers of open trajectories active after `since` (Unix seconds), oldest first."""
        calls, answers, runs = schema.calls, schema.choices, schema.trajectories
        query = (
            sa.select(calls, answers.c.choice, answers.c.link_key, answers.c.tool_call_ids, runs.c.last_active_at)
            .join(answers, answers.c.call_id == calls.c.id)
            .join(runs, runs.c.id == calls.c.trajectory_id)
            .where(runs.c.state == TrajectoryState.OPEN, runs.c.last_active_at >= since, answers.c.link_key != "")
            .order_by(calls.c.id.desc())
            .limit(limit)
        )
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
            known = sequences(load_calls(connection, calls.c.trajectory_id.in_({row.trajectory_id for row in rows})))
        return [
            OpenLeaf(
                trajectory_id=row.trajectory_id,
                call_id=row.id,
                choice=row.choice,
                alias=row.alias,
                version=row.version,
                link_key=row.link_key,
                tool_call_ids=tuple(row.tool_call_ids),
                key_id=row.key_id,
                sequence=known.get((row.id, row.choice), b""),
                last_active_at=row.last_active_at,
            )
            for row in reversed(rows)
        ]


def insert_new(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, leaving those whose primary key exists as they are."""
    if not rows:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).on_conflict_do_nothing(), rows)


def _add_messages(connection: sa.Connection, records: Sequence[Shipment]) -> None:
    nodes: dict[str, MessageNode] = {}
    toolsets: dict[str, bytes] = {}
    for record in records:
        begun = record if isinstance(record, CallBegun) else record.begun
        for node in (*begun.nodes, *(record.nodes if isinstance(record, CallEnded) else ())):
            nodes[node.hash] = node
        if begun.tools:
            toolsets[begun.tools_hash] = begun.tools
    insert_new(connection, schema.messages, [msgspec.structs.asdict(node) for node in nodes.values()])
    insert_new(connection, schema.toolsets, [{"hash": name, "body": body} for name, body in toolsets.items()])


def _begin(connection: sa.Connection, begun: CallBegun) -> None:
    """Insert the call's row unless it is there, with its trajectory where that is new."""
    if connection.scalar(sa.select(schema.calls.c.id).where(schema.calls.c.id == begun.call_id)):
        return
    trajectory_id = _host_trajectory(connection, begun)
    row = msgspec.structs.asdict(begun)
    for name in ("call_id", "task", "purpose", "nodes", "tools"):
        row.pop(name)
    row |= {
        "id": begun.call_id,
        "trajectory_id": trajectory_id,
        "state": CallState.BEGUN,
        "tags": list(begun.tags),
        "sampling": dict(begun.sampling),
        "context": "root",
        "prompt_ids": b"",
        "prompt_tokens": 0,
        "completion_tokens": 0,
    }
    connection.execute(sa.insert(schema.calls).values(row))


def _host_trajectory(connection: sa.Connection, begun: CallBegun) -> str:
    """Return the id of the open trajectory for this call: the named one, a new one, or a sealed one's successor."""
    runs = schema.trajectories
    found = connection.execute(
        sa.select(runs.c.state, runs.c.successors).where(runs.c.id == begun.trajectory_id)
    ).one_or_none()
    trajectory_id = begun.trajectory_id
    if found is not None and found.state != TrajectoryState.OPEN:
        latest = f"{trajectory_id}~{found.successors}"
        state = connection.scalar(sa.select(runs.c.state).where(runs.c.id == latest)) if found.successors else None
        if state == TrajectoryState.OPEN:
            trajectory_id, found = latest, found
        else:
            trajectory_id, found = f"{begun.trajectory_id}~{found.successors + 1}", None
            connection.execute(
                sa.update(runs).where(runs.c.id == begun.trajectory_id).values(successors=runs.c.successors + 1)
            )
    if found is None:
        connection.execute(
            sa.insert(runs).values(
                id=trajectory_id,
                alias=begun.alias,
                version=begun.version,
                state=TrajectoryState.OPEN,
                purpose=begun.purpose,
                task=begun.task,
                root_node=begun.prompt_node,
                tools_hash=begun.tools_hash,
                key_id=begun.key_id,
                opened_at=begun.started_at,
                last_active_at=begun.started_at,
            )
        )
    else:
        _touch(connection, trajectory_id, begun.started_at)
    return trajectory_id


def _touch(connection: sa.Connection, trajectory_id: str, at: float) -> None:
    runs = schema.trajectories
    connection.execute(
        sa.update(runs).where(runs.c.id == trajectory_id, runs.c.last_active_at < at).values(last_active_at=at)
    )


def _end(connection: sa.Connection, ended: CallEnded) -> None:
    """Write the call's end once; an end that is already there stays."""
    table = schema.calls
    written = connection.execute(
        sa.update(table)
        .where(table.c.id == ended.begun.call_id, table.c.state.in_([CallState.BEGUN, CallState.INTERRUPTED]))
        .values(
            state=ended.state,
            ended_at=ended.ended_at,
            first_byte_at=ended.first_byte_at,
            status=ended.status,
            context=ended.context,
            prompt_ids=ended.prompt_ids,
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            untrainable=ended.untrainable,
            error=ended.error,
            upstream=ended.upstream,
        )
    )
    if not written.rowcount:
        return
    if ended.choices:
        connection.execute(
            sa.insert(schema.choices),
            [
                {name: value for name, value in msgspec.structs.asdict(choice).items() if name != "index"}
                | {
                    "call_id": ended.begun.call_id,
                    "choice": choice.index,
                    "tool_call_ids": list(choice.tool_call_ids),
                }
                for choice in ended.choices
            ],
        )
    trajectory_id = connection.scalar(sa.select(table.c.trajectory_id).where(table.c.id == ended.begun.call_id))
    _touch(connection, str(trajectory_id), ended.ended_at)


def load_calls(connection: sa.Connection, where: sa.ColumnElement[bool]) -> list[Call]:
    """Return the calls that match, with their choices, in the order in which they began."""
    rows = connection.execute(
        sa.select(schema.calls).where(where).order_by(schema.calls.c.started_at, schema.calls.c.id)
    ).all()
    answers: dict[str, list[Choice]] = {}
    for chunk in range(0, len(rows), 500):
        names = [row.id for row in rows[chunk : chunk + 500]]
        found = sa.select(schema.choices).where(schema.choices.c.call_id.in_(names)).order_by(schema.choices.c.choice)
        for answer in connection.execute(found):
            answers.setdefault(answer.call_id, []).append(_choice(answer))
    return [_call(row, tuple(answers.get(row.id, ()))) for row in rows]


def _choice(row: Any) -> Choice:
    return Choice(
        index=row.choice,
        finish_reason=row.finish_reason,
        ids=row.ids,
        logprobs=row.logprobs,
        reply_node=row.reply_node,
        link_key=row.link_key,
        tool_call_ids=tuple(row.tool_call_ids),
    )


def _call(row: Any, answers: tuple[Choice, ...]) -> Call:
    names = [field for field in Call.__struct_fields__ if field not in ("choices", "state")]
    return Call(choices=answers, state=CallState(row.state), **{name: getattr(row, name) for name in names})
