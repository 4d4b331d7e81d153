"""Linking state of a proxy after a restart: the answers that a request may continue, and unanswered calls.

Answers are read in batches of whole trajectories, each when it is wanted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from ratchet.store.calls.shipping import Blocks
from ratchet.store.content.messages import parents_first
from ratchet.store.content.token_sequences import TokenCall, sequences
from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.db.verbs import chunks
from ratchet.store.records import OpenLeaf, UnansweredCall, family_of, row_to
from ratchet.store.states import UNANSWERED, TrajectoryState

_FAMILY = (schema.trajectories.c.task, schema.trajectories.c.tools_hash.label("first_tools"))
_CALL_COLUMNS = (
    *("id", "trajectory_id", "alias", "version", "key_id", "parent_call", "parent_choice"),
    *("context", "prompt_blocks", "prompt_ids", "prompt_node"),
)
_CHOICE_COLUMNS = ("call_id", "choice", "token_ids", "reply_node", "link_key", "skip_last_key", "tool_call_ids")
_BATCH = 256  # answers


class AnswerName(NamedTuple):
    """A stored answer."""

    call_id: str
    choice: int


Answers = Mapping[str, Collection[AnswerName]]  # by trajectory id


class ResumeState:
    """Queries on open trajectories."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def open_answers(self, since: float, limit: int) -> list[Answers]:
        """Return the answers of open trajectories active after `since` (Unix seconds), at most `limit`, in batches.

        If there are more, the latest answer of every trajectory comes before the second latest of any, and so on. The
        answers of a trajectory are in one batch, of about `_BATCH` answers: the least recently active trajectory first.
        """
        calls, answers, trajectories = schema.calls, schema.choices, schema.trajectories
        newest_first = (calls.c.id.desc(), answers.c.choice.desc())
        rank = sa.func.row_number().over(partition_by=calls.c.trajectory_id, order_by=newest_first)
        query = (
            sa.select(calls.c.trajectory_id, calls.c.id, answers.c.choice, trajectories.c.last_active_at)
            .join(answers, answers.c.call_id == calls.c.id)
            .join(trajectories, trajectories.c.id == calls.c.trajectory_id)
            .where(_open(since), answers.c.link_key != "")
            .order_by(rank, *newest_first)
            .limit(limit)
        )
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
        own: dict[str, list[AnswerName]] = {}
        oldest_first = [*reversed(rows)]
        for row in sorted(oldest_first, key=lambda row: float(row.last_active_at)):
            own.setdefault(row.trajectory_id, []).append(AnswerName(row.id, row.choice))
        batches: list[dict[str, list[AnswerName]]] = []
        size = _BATCH
        for trajectory_id, names in own.items():
            if size >= _BATCH:
                batches.append({})
                size = 0
            batches[-1][trajectory_id] = names
            size += len(names)
        return list(batches)

    def extended_answers(self, trajectory_ids: Sequence[str]) -> set[AnswerName]:
        """Return the answers in these trajectories that later calls of the same trajectories continue."""
        calls = schema.calls
        parents = sa.select(calls.c.parent_call, calls.c.parent_choice).where(calls.c.trajectory_id.in_(trajectory_ids))
        with read(self._engine) as connection:
            rows = connection.execute(parents.where(calls.c.parent_call.is_not(None)))
            return {AnswerName(row.parent_call, row.parent_choice) for row in rows}

    def open_leaves(self, answers: Answers) -> list[OpenLeaf]:
        """Return these answers of trajectories that are open: in their order, and of each the oldest answer first.

        Raises RecordDamaged.
        """
        with read(self._engine) as connection:
            return _leaves(connection, answers)

    def unanswered_calls(self, since: float, limit: int = 10_000) -> list[UnansweredCall]:
        """Return the calls of open trajectories since then that were not answered, oldest first."""
        calls, trajectories = schema.calls, schema.trajectories
        later = calls.alias("later")
        repeated = sa.exists().where(
            later.c.trajectory_id == calls.c.trajectory_id,
            later.c.prompt_node == calls.c.prompt_node,
            later.c.id > calls.c.id,
        )
        query = (
            sa.select(calls, trajectories.c.purpose, trajectories.c.last_active_at, *_FAMILY)
            .join(trajectories, trajectories.c.id == calls.c.trajectory_id)
            .where(_open(since), calls.c.started_at >= since, calls.c.state.in_(UNANSWERED), ~repeated)
            .order_by(calls.c.id.desc())
            .limit(limit)
        )
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
        return [_attempt(row) for row in reversed(rows)]


def _open(since: float) -> sa.ColumnElement[bool]:
    trajectories = schema.trajectories
    return sa.and_(trajectories.c.state == TrajectoryState.OPEN, trajectories.c.last_active_at >= since)


def _leaves(connection: sa.Connection, wanted: Answers) -> list[OpenLeaf]:
    calls, answers, trajectories = schema.calls, schema.choices, schema.trajectories
    columns = (trajectories.c.id, trajectories.c.root_node, trajectories.c.purpose, trajectories.c.last_active_at)
    are_open = sa.and_(trajectories.c.id.in_(list(wanted)), trajectories.c.state == TrajectoryState.OPEN)
    known = {row.id: row for row in connection.execute(sa.select(*columns, *_FAMILY).where(are_open))}
    inside = calls.c.trajectory_id.in_(list(known))
    by_time = sa.select(*(calls.c[name] for name in _CALL_COLUMNS)).where(inside)
    by_time = by_time.order_by(calls.c.started_at, calls.c.id)
    call_rows = parents_first(connection.execute(by_time).all())
    choice_rows = connection.execute(
        sa.select(*(answers.c[name] for name in _CHOICE_COLUMNS)).join(calls).where(inside).order_by(answers.c.choice)
    )
    choices: dict[str, list[Any]] = {}
    for row in choice_rows:
        choices.setdefault(row.call_id, []).append(row)
    prompts = Blocks(connection, call_rows)
    whole = sequences(
        TokenCall(
            row.id,
            row.parent_call,
            row.parent_choice,
            row.context,
            prompts.full_prompt(row),
            {choice.choice: choice.token_ids for choice in choices.get(row.id, ())},
        )
        for row in call_rows
    )
    continued = {(row.parent_call, row.parent_choice) for row in call_rows}
    chosen = {name for names in wanted.values() for name in names}
    shown = {
        row.id: [choice for choice in choices.get(row.id, ()) if (row.id, choice.choice) in chosen] for row in call_rows
    }
    names = {row.root_node for row in known.values()}
    names.update(row.prompt_node for row in call_rows if shown[row.id])
    names.update(choice.reply_node for found in shown.values() for choice in found)
    bodies = _bodies(connection, sorted(names))
    order = {name: place for place, name in enumerate(wanted)}
    return [
        _leaf(known[row.trajectory_id], row, choice, whole, continued, bodies)
        for row in sorted(call_rows, key=lambda row: (order[row.trajectory_id], row.id))
        for choice in shown[row.id]
    ]


def _leaf(
    trajectory: Any,
    call: Any,
    answer: Any,
    whole: Mapping[tuple[str, int], bytes],
    continued: Collection[tuple[str | None, int]],
    bodies: Mapping[str, bytes],
) -> OpenLeaf:
    name = call.id, answer.choice
    return OpenLeaf(
        trajectory_id=call.trajectory_id,
        call_id=call.id,
        choice=answer.choice,
        alias=call.alias,
        version=call.version,
        link_key=answer.link_key,
        skip_last_key=answer.skip_last_key,
        tool_call_ids=tuple(answer.tool_call_ids),
        key_id=call.key_id,
        purpose=trajectory.purpose,
        sequence=whole.get(name, b""),
        last_active_at=trajectory.last_active_at,
        family=family_of(trajectory.task, trajectory.first_tools),
        extended=name in continued,
        reply=bodies.get(answer.reply_node, b""),
        prompt_messages=tuple(bodies[node] for node in (trajectory.root_node, call.prompt_node) if node in bodies),
    )


def _attempt(row: Any) -> UnansweredCall:
    ended_at = row.ended_at or row.started_at
    return row_to(UnansweredCall, row, ended_at=ended_at, family=family_of(row.task, row.first_tools))


def _bodies(connection: sa.Connection, names: Iterable[str]) -> dict[str, bytes]:
    """Return messages by hash, as canonical JSON."""
    table, wanted = schema.messages, list(names)
    query = sa.select(table.c.hash, table.c.body)
    found = [connection.execute(query.where(table.c.hash.in_(some))) for some in chunks(wanted)]
    return {row.hash: row.body for rows in found for row in rows}
