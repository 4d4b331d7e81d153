"""Linking state of a proxy after a restart: the answers that a request may continue, and unanswered calls.

Answers are read in batches of whole trajectories, each when it is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from ratchet.store.calls.shipping import Blocks
from ratchet.store.content.messages import parents_first
from ratchet.store.content.token_sequences import TokenCall, sequences
from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.db.verbs import Verbs, chunks, matches
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


class ResumeState(Verbs):
    """Queries on open trajectories."""

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
        rows = self._rows(query)
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
        rows = self._rows(parents.where(calls.c.parent_call.is_not(None)))
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
        return [
            row_to(
                UnansweredCall,
                row,
                ended_at=row.ended_at or row.started_at,
                family=family_of(row.task, row.first_tools),
            )
            for row in reversed(self._rows(query))
        ]


def _open(since: float) -> sa.ColumnElement[bool]:
    trajectories = schema.trajectories
    return sa.and_(trajectories.c.state == TrajectoryState.OPEN, trajectories.c.last_active_at >= since)


def _leaves(connection: sa.Connection, wanted: Answers) -> list[OpenLeaf]:
    calls, answers, trajectories = schema.calls, schema.choices, schema.trajectories
    columns = (trajectories.c.id, trajectories.c.root_node, trajectories.c.purpose, trajectories.c.last_active_at)
    are_open = matches(trajectories, id=list(wanted), state=TrajectoryState.OPEN)
    known = {row.id: row for row in connection.execute(sa.select(*columns, *_FAMILY).where(are_open))}
    inside = calls.c.trajectory_id.in_(list(known))
    by_time = sa.select(*(calls.c[name] for name in _CALL_COLUMNS)).where(inside)
    call_rows = parents_first(connection.execute(by_time.order_by(calls.c.started_at, calls.c.id)).all())
    theirs = sa.select(*(answers.c[name] for name in _CHOICE_COLUMNS)).join(calls).where(inside)
    choices: defaultdict[str, list[Any]] = defaultdict(list)
    for row in connection.execute(theirs.order_by(answers.c.choice)):
        choices[row.call_id].append(row)
    prompts = Blocks(connection, call_rows)
    whole = sequences(
        TokenCall(row.id, row.parent_call, row.parent_choice, row.context, prompts.full_prompt(row),
                  {choice.choice: choice.token_ids for choice in choices[row.id]})
        for row in call_rows
    )  # fmt: skip
    continued = {(row.parent_call, row.parent_choice) for row in call_rows}
    chosen = {name for names in wanted.values() for name in names}
    shown = {row.id: [one for one in choices[row.id] if (row.id, one.choice) in chosen] for row in call_rows}
    names = {row.root_node for row in known.values()}
    names.update(row.prompt_node for row in call_rows if shown[row.id])
    names.update(choice.reply_node for found in shown.values() for choice in found)
    table = schema.messages
    bodies: dict[str, bytes] = {}
    for some in chunks(sorted(names)):
        rows = connection.execute(sa.select(table.c.hash, table.c.body).where(table.c.hash.in_(some)))
        bodies |= {row.hash: row.body for row in rows}
    order = {name: place for place, name in enumerate(wanted)}
    return [
        _leaf(known[row.trajectory_id], row, choice, whole, continued, bodies)
        for row in sorted(call_rows, key=lambda row: (order[row.trajectory_id], row.id))
        for choice in shown[row.id]
    ]


def _leaf(
    trajectory: Any, call: Any, answer: Any, whole: Mapping[tuple[str, int], bytes],
    continued: Collection[tuple[str | None, int]], bodies: Mapping[str, bytes],
) -> OpenLeaf:  # fmt: skip
    name = call.id, answer.choice
    return row_to(
        OpenLeaf, call, call_id=call.id, choice=answer.choice, link_key=answer.link_key,
        skip_last_key=answer.skip_last_key, tool_call_ids=tuple(answer.tool_call_ids), purpose=trajectory.purpose,
        sequence=whole.get(name, b""), last_active_at=trajectory.last_active_at, extended=name in continued,
        family=family_of(trajectory.task, trajectory.first_tools), reply=bodies.get(answer.reply_node, b""),
        prompt_messages=tuple(bodies[node] for node in (trajectory.root_node, call.prompt_node) if node in bodies),
    )  # fmt: skip
