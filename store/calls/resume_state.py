"""Linking state of a proxy after a restart: the answers that a request may continue, and unanswered calls.

Reads the newest calls of each trajectory, up to a limit in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.calls.calls import load_calls
from ratchet.store.content.token_sequences import sequences
from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES
from ratchet.store.db.engine import read
from ratchet.store.records import OpenLeaf, UnansweredCall, family_of
from ratchet.store.records.base import row_to
from ratchet.store.states import CallState, TrajectoryState

_LOST = (CallState.ABORTED, CallState.INTERRUPTED)
_FAMILY = (schema.trajectories.c.task, schema.trajectories.c.tools_hash.label("first_tools"))
MAX_OPEN_LEAVES = 10_000  # answers that are restored
_BATCH = 256  # answers
_RETRIED = (408, 409, 429)  # besides every 5xx


class ResumeState:
    """Queries on open trajectories."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def open_leaves(self, since: float, limit: int = MAX_OPEN_LEAVES) -> Iterator[list[OpenLeaf]]:
        """Yield the answers of open trajectories active after `since` (Unix seconds), at most `limit`, in batches.

        If there are more, the latest answer of every trajectory comes before the second latest of any, and so on. The
        answers of a trajectory are in one batch, of about `_BATCH` answers: the least recently active trajectory first,
        and of each the oldest answer first. Each batch is read when it is wanted.
        """
        calls, answers, trajectories = schema.calls, schema.choices, schema.trajectories
        columns = (calls.c.id, calls.c.trajectory_id, calls.c.alias, calls.c.version, calls.c.key_id)
        nodes = (calls.c.prompt_node, answers.c.reply_node, trajectories.c.root_node)
        links = (answers.c.choice, answers.c.link_key, answers.c.skip_last_key, answers.c.tool_call_ids)
        newest_first = (calls.c.id.desc(), answers.c.choice.desc())
        rank = sa.func.row_number().over(partition_by=calls.c.trajectory_id, order_by=newest_first)
        query = (
            sa.select(*columns, *nodes, *links, trajectories.c.purpose, trajectories.c.last_active_at, *_FAMILY)
            .join(answers, answers.c.call_id == calls.c.id)
            .join(trajectories, trajectories.c.id == calls.c.trajectory_id)
            .where(_open(since), answers.c.link_key != "")
            .order_by(rank, *newest_first)
            .limit(limit)
        )
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
        own: dict[str, list[Any]] = {}
        for row in reversed(rows):
            own.setdefault(row.trajectory_id, []).append(row)
        batch: list[Any] = []
        for group in sorted(own.values(), key=lambda group: group[-1].last_active_at):
            batch += group
            if len(batch) >= _BATCH:
                yield self._leaves(batch)
                batch = []
        if batch:
            yield self._leaves(batch)

    def _leaves(self, rows: Sequence[Any]) -> list[OpenLeaf]:
        """Return the answers of whole trajectories."""
        names = {name for row in rows for name in (row.reply_node, row.root_node, row.prompt_node)}
        with read(self._engine) as connection:
            inside = load_calls(connection, schema.calls.c.trajectory_id.in_({row.trajectory_id for row in rows}))
            bodies = _bodies(connection, sorted(names))
        known = sequences(inside)
        continued = {(call.parent_call, call.parent_choice) for call in inside}
        return [_leaf(row, known, continued, bodies) for row in rows]

    def unanswered_calls(self, since: float, limit: int = 10_000) -> list[UnansweredCall]:
        """Return the calls of open trajectories since then that were not answered, oldest first."""
        calls, trajectories = schema.calls, schema.trajectories
        failed = sa.and_(calls.c.state == CallState.FAILED, sa.or_(calls.c.status >= 500, calls.c.status.in_(_RETRIED)))
        later = calls.alias("later")
        repeated = sa.exists().where(
            later.c.trajectory_id == calls.c.trajectory_id,
            later.c.prompt_node == calls.c.prompt_node,
            later.c.id > calls.c.id,
        )
        query = (
            sa.select(calls, trajectories.c.purpose, trajectories.c.last_active_at, *_FAMILY)
            .join(trajectories, trajectories.c.id == calls.c.trajectory_id)
            .where(_open(since), calls.c.started_at >= since, sa.or_(calls.c.state.in_(_LOST), failed), ~repeated)
            .order_by(calls.c.id.desc())
            .limit(limit)
        )
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
        return [_attempt(row) for row in reversed(rows)]


def _open(since: float) -> sa.ColumnElement[bool]:
    trajectories = schema.trajectories
    return sa.and_(trajectories.c.state == TrajectoryState.OPEN, trajectories.c.last_active_at >= since)


def _leaf(
    row: Any,
    known: dict[tuple[str, int], bytes],
    continued: set[tuple[str | None, int]],
    bodies: dict[str, bytes],
) -> OpenLeaf:
    return OpenLeaf(
        trajectory_id=row.trajectory_id,
        call_id=row.id,
        choice=row.choice,
        alias=row.alias,
        version=row.version,
        link_key=row.link_key,
        skip_last_key=row.skip_last_key,
        tool_call_ids=tuple(row.tool_call_ids),
        key_id=row.key_id,
        purpose=row.purpose,
        sequence=known.get((row.id, row.choice), b""),
        last_active_at=row.last_active_at,
        family=family_of(row.task, row.first_tools),
        extended=(row.id, row.choice) in continued,
        reply=bodies.get(row.reply_node, b""),
        prompt_messages=tuple(bodies[name] for name in (row.root_node, row.prompt_node) if name in bodies),
    )


def _attempt(row: Any) -> UnansweredCall:
    ended_at = row.ended_at or row.started_at
    return row_to(UnansweredCall, row, ended_at=ended_at, family=family_of(row.task, row.first_tools))


def _bodies(connection: sa.Connection, names: Iterable[str]) -> dict[str, bytes]:
    """Return messages by hash, as canonical JSON."""
    table, wanted = schema.messages, list(names)
    found: dict[str, bytes] = {}
    for start in range(0, len(wanted), MAX_IN_VALUES):
        chosen = sa.select(table.c.hash, table.c.body).where(table.c.hash.in_(wanted[start : start + MAX_IN_VALUES]))
        found |= {row.hash: row.body for row in connection.execute(chosen)}
    return found
