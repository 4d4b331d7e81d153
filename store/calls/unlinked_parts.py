"""Recognizes the rest of an `unlinked` trajectory that its proxy has forgotten: idle, evicted, or before a restart.

Only calls that name the trajectory get here: for others, what an unlinked trajectory is continued by is decided where
it is known. Parts of a trajectory are itself and its successors.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.ids import may_share_trajectory
from ratchet.store.records import UNLINKED, CallStarted

_MAX_PARTS = 16  # the latest that are read


def mark_rest(connection: sa.Connection, start: CallStarted) -> CallStarted:
    """Return the start of a call, `unlinked` if it goes on with an unlinked part of the trajectory that it names.

    It does if it has a history, and this agent's latest part is unlinked, or an unlinked one gave an answer of that
    history. A call without one begins again: clients also use a name for one run after the other.
    """
    is_rest = start.purpose == "live" and _is_rest(connection, start)
    return msgspec.structs.replace(start, purpose=UNLINKED) if is_rest else start


def _is_rest(connection: sa.Connection, start: CallStarted) -> bool:
    parts = _parts(connection, start)
    unlinked = [name for name, purpose in parts if purpose == UNLINKED]
    if not unlinked:
        return False
    path = _path(connection, start.prompt_node)
    if parts[-1][1] == UNLINKED:
        return "assistant" in path.values()
    calls, choices = schema.calls, schema.choices
    answers = sa.select(choices.c.reply_node).join(calls, calls.c.id == choices.c.call_id)
    return not path.keys().isdisjoint(connection.scalars(answers.where(calls.c.trajectory_id.in_(unlinked))))


def _parts(connection: sa.Connection, start: CallStarted) -> list[tuple[str, str]]:
    """Return id and purpose of the parts of this call's agent and key, the latest one last."""
    table, origin = schema.trajectories, start.trajectory_id
    last = int(connection.scalar(sa.select(table.c.successors).where(table.c.id == origin)) or 0)
    names = [origin, *(f"{origin}~{number}" for number in range(max(1, last - _MAX_PARTS + 1), last + 1))]
    columns = (table.c.id, table.c.purpose, table.c.key_id)
    found = connection.execute(sa.select(*columns).where(table.c.id.in_(names), table.c.alias == start.alias))
    own = {row.id: row.purpose for row in found if may_share_trajectory(row.key_id, start.key_id)}
    return [(name, own[name]) for name in names if name in own]


def _path(connection: sa.Connection, leaf: str) -> dict[str, str]:
    """Return the roles of the messages from the root to `leaf`, by hash."""
    table, up = schema.messages, schema.messages.alias("up")
    chain = sa.select(table.c.hash, table.c.parent, table.c.role).where(table.c.hash == leaf)
    path = chain.cte("path", recursive=True)
    path = path.union_all(sa.select(up.c.hash, up.c.parent, up.c.role).where(up.c.hash == path.c.parent))
    return {row.hash: row.role for row in connection.execute(sa.select(path.c.hash, path.c.role))}
