"""Checks calls and answers: tokens decode and agree in number, references exist, and chains end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.calls.prompt_blocks import block_digests
from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES
from ratchet.store.db.column_types import decompress_token_ids
from ratchet.store.errors import RecordDamaged
from ratchet.store.states import CallState
from ratchet.store.verify.violation import Page, Violation, existing_values, undecoded

_BACKUP = "restore it from a backup"
_UNTRAINED = "its tokens will not be trained; restore it from a backup to have them"
_MAX_CHAIN_LENGTH = 100_000  # calls


def check_calls(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check calls with their answers."""
    answers = _answers(connection, [row.id for row in page])
    parents = _parents(connection, page)
    named = {row.prompt_node for row in page} | {one.reply_node for some in answers.values() for one in some}
    messages = existing_values(connection, schema.messages.c.hash, named - {""})
    toolsets = existing_values(connection, schema.toolsets.c.hash, {row.tools_hash for row in page} - {""})
    blocks = _blocks(connection, page)
    strangers = _strangers(connection, [row.id for row in page])
    for row in page:
        own = answers.get(row.id, [])
        name = f"call {row.id}"
        if row.prompt_node and row.prompt_node not in messages:
            remedy = f"{_BACKUP}; the transcript is incomplete, its tokens are not affected"
            yield Violation(row=name, problem=f"its prompt {row.prompt_node} is missing", remedy=remedy)
        if row.tools_hash and row.tools_hash not in toolsets:
            yield Violation(row=name, problem=f"its tool list {row.tools_hash} is missing", remedy=_BACKUP)
        if row.id in strangers:
            problem = f"it is of {row.alias}, its trajectory {row.trajectory_id} of {strangers[row.id]}"
            yield Violation(row=name, problem=problem, remedy="drop its trajectory: no adapter may learn from both")
        yield from _state(name, row, own)
        yield from _prompt(name, row, blocks)
        yield from _context(connection, name, row, parents)
        for one in own:
            yield from _answer(f"{name} choice {one.choice}", row, one, messages)


def _strangers(connection: sa.Connection, call_ids: Sequence[str]) -> dict[str, str]:
    """Return the calls that are in another agent's trajectory, each with that agent."""
    calls, runs = schema.calls, schema.trajectories
    query = sa.select(calls.c.id, runs.c.alias).join(runs, runs.c.id == calls.c.trajectory_id)
    query = query.where(runs.c.alias != calls.c.alias)
    found: dict[str, str] = {}
    for start in range(0, len(call_ids), MAX_IN_VALUES):
        rows = connection.execute(query.where(calls.c.id.in_(call_ids[start : start + MAX_IN_VALUES])))
        found |= {row.id: row.alias for row in rows}
    return found


def _state(name: str, row: Any, own: Sequence[Any]) -> Iterator[Violation]:
    remedy = "start the proxy that recorded it: its journal may hold the end; else drop its trajectory"
    ended = row.state not in (CallState.STARTED, CallState.INTERRUPTED)
    if ended != (row.ended_at is not None):
        problem = f"it is {row.state} and has {'no' if ended else 'an'} end"
        yield Violation(row=name, problem=problem, remedy=remedy)
    if row.state == CallState.ANSWERED and [one.choice for one in own] != list(range(len(own))):
        problem = f"its answers are numbered {[one.choice for one in own]}: one is missing"
        yield Violation(row=name, problem=problem, remedy=_BACKUP)


def _prompt(name: str, row: Any, blocks: Mapping[tuple[str, bytes], int]) -> Iterator[Violation]:
    """Check that the prompt decodes, its blocks exist, and a whole prompt has as many tokens as the engine reported."""
    size = _size(row.prompt_ids)
    if size is None:
        yield Violation(row=name, problem="its prompt's token ids are damaged", remedy=_UNTRAINED)
        return
    for part in block_digests(row.prompt_blocks):
        if (row.trajectory_id, part) not in blocks:
            problem = f"block {part.hex()} of its prompt is missing"
            yield Violation(row=name, problem=problem, remedy=_UNTRAINED)
            return
        size += blocks[row.trajectory_id, part]
    if row.context != "exact" and size and not row.untrainable and size != row.prompt_tokens:
        problem = f"its prompt has {size} token ids, the engine reported {row.prompt_tokens}"
        yield Violation(row=name, problem=problem, remedy=_UNTRAINED)


def _context(connection: sa.Connection, name: str, row: Any, parents: Mapping[str, Any]) -> Iterator[Violation]:
    """Check that an exact call continues an answer of its trajectory, or of a predecessor."""
    parent = parents.get(row.parent_call or "")
    if row.context != "exact" or parent is None:  # deleted, or never shipped: its tokens are not trained
        return
    if _origin(parent.trajectory_id) != _origin(row.trajectory_id):
        problem = f"it continues call {parent.id} of trajectory {parent.trajectory_id}, which is another run"
        yield Violation(row=name, problem=problem, remedy=_UNTRAINED)
    if parent.started_at >= row.started_at and _is_circle(connection, row.id):
        remedy = "set parent_call of one of them to NULL and its context to 'fork'"
        yield Violation(row=name, problem="its chain of parent calls is a cycle", remedy=remedy)


def _answer(name: str, row: Any, one: Any, messages: set[str]) -> Iterator[Violation]:
    size = _size(one.token_ids)
    if size is None:
        yield Violation(row=name, problem="its token ids are damaged", remedy=_UNTRAINED)
    elif len(one.logprobs) % 4 or (size and one.logprobs and size != len(one.logprobs) // 4 and not row.untrainable):
        problem = f"it has {size} token ids and {len(one.logprobs) / 4:g} logprobs"
        yield Violation(row=name, problem=problem, remedy=_UNTRAINED)
    if one.reply_node and one.reply_node not in messages:
        remedy = f"{_BACKUP}; its tokens are not affected"
        yield Violation(row=name, problem=f"its message {one.reply_node} is missing", remedy=remedy)


def _size(packed: bytes) -> int | None:
    """Return the number of packed token ids; None if they are damaged."""
    try:
        return len(decompress_token_ids(bytes(packed))) // 4
    except RecordDamaged:
        return None


def _origin(trajectory_id: str) -> str:
    name, _, number = trajectory_id.rpartition("~")
    return name if name and number.isdigit() else trajectory_id


def _is_circle(connection: sa.Connection, name: str) -> bool:
    """Follow a chain of calls, one at a time; only needed if the start times are out of order."""
    table, at = schema.calls, name
    for _ in range(_MAX_CHAIN_LENGTH):
        above = connection.scalar(sa.select(table.c.parent_call).where(table.c.id == at))
        if above is None:
            return False
        if above == name:
            return True
        at = above
    return True


def _answers(connection: sa.Connection, names: Sequence[str]) -> dict[str, list[Any]]:
    table = schema.choices
    query = sa.select(*undecoded(table)).where(table.c.call_id.in_(names)).order_by(table.c.call_id, table.c.choice)
    found: dict[str, list[Any]] = {}
    for row in connection.execute(query):
        found.setdefault(row.call_id, []).append(row)
    return found


def _parents(connection: sa.Connection, page: Page) -> dict[str, Any]:
    table = schema.calls
    names = sorted({row.parent_call for row in page if row.parent_call})
    query = sa.select(table.c.id, table.c.trajectory_id, table.c.started_at).where(table.c.id.in_(names))
    return {row.id: row for row in connection.execute(query)}


def _blocks(connection: sa.Connection, page: Page) -> dict[tuple[str, bytes], int]:
    """Return the number of token ids of each block of these calls' trajectories, without damaged ones."""
    table = schema.prompt_blocks
    trajectories = sorted({row.trajectory_id for row in page if row.prompt_blocks})
    packed = sa.type_coerce(table.c.token_ids, sa.LargeBinary).label("token_ids")
    query = sa.select(table.c.trajectory_id, table.c.digest, packed).where(table.c.trajectory_id.in_(trajectories))
    sizes = ((row, _size(row.token_ids)) for row in connection.execute(query))
    return {(row.trajectory_id, bytes(row.digest)): size for row, size in sizes if size is not None}
