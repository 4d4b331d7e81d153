"""Reads the messages and tools that calls name by hash, and finds trajectories in which some are missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from ratchet.store.content.messages import ROOT, SYSTEM_ROLES, conversation_range
from ratchet.store.db import schema
from ratchet.store.db.bulk import in_values
from ratchet.store.db.column_types import NOT_DECODED
from ratchet.store.db.schema import SHARED_PARENT
from ratchet.store.db.verbs import chunks
from ratchet.store.errors import RecordDamaged

_T = TypeVar("_T")


def load_path(connection: sa.Connection, leaf: str) -> tuple[Mapping[str, Any], ...]:
    """Return the messages from the root to `leaf`. Raises RecordDamaged."""
    table = schema.messages
    start = sa.select(table.c.parent, table.c.body, sa.literal(0).label("depth")).where(table.c.hash == leaf)
    chain = start.cte("chain", recursive=True)
    parent = table.alias("up")
    chain = chain.union_all(
        sa.select(parent.c.parent, parent.c.body, chain.c.depth + 1).where(parent.c.hash == chain.c.parent)
    )
    bodies = connection.scalars(sa.select(chain.c.body).order_by(chain.c.depth.desc()))
    return tuple(_decode(body, dict[str, Any]) for body in bodies)


def system_prompt(connection: sa.Connection, leaf: str) -> str:
    """Return the system prompt at the start of the path to a message, or an empty text."""
    table, up = schema.messages, schema.messages.alias("up")
    start = sa.select(table.c.hash, table.c.parent).where(table.c.hash == leaf)
    chain = start.cte("chain", recursive=True)
    chain = chain.union_all(sa.select(up.c.hash, up.c.parent).where(up.c.hash == chain.c.parent))
    first = sa.select(chain.c.hash).where(chain.c.parent == ROOT).scalar_subquery()
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
