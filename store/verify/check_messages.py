"""Messages and tool lists: do they decode, have they the hash of what they hold, and does somebody name them?"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec
import sqlalchemy as sa

from ratchet.store.content.messages import ROOT, is_intact, is_intact_toolset
from ratchet.store.db import schema
from ratchet.store.db.column_types import unpack_body
from ratchet.store.records import MessageNode
from ratchet.store.verify.violation import Page, Violation, existing_values

_LOST = "restore it from a backup; transcripts through it are cut off, tokens are not touched"
_LEFT = "nothing is lost: the next `ratchet store prune` deletes it"


def check_messages(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Each message has the hash of its parent and body; its parent is there; something leads to it."""
    there = existing_values(connection, schema.messages.c.hash, {row.parent for row in page} - {ROOT})
    nobodys = _unnamed(connection, [row.hash for row in page])
    for row in page:
        name = f"message {row.hash}"
        body = _body(row.body)
        if body is None:
            yield Violation(row=name, problem="its body does not inflate to JSON", remedy=_LOST)
        elif not is_intact(MessageNode(hash=row.hash, parent=row.parent, role=row.role, body=body)):
            yield Violation(row=name, problem="its hash is not that of its parent and body", remedy=_LOST)
        if row.parent != ROOT and row.parent not in there:
            yield Violation(row=name, problem=f"its parent {row.parent} is not there", remedy=_LOST)
        if row.hash in nobodys:
            yield Violation(row=name, problem="no call, answer or message names it", remedy=_LEFT)


def check_toolsets(_: sa.Connection, page: Page) -> Iterator[Violation]:
    """Each tool list has the hash of what it holds."""
    for row in page:
        body = _body(row.body)
        if body is None or not is_intact_toolset(row.hash, body):
            problem = "it does not inflate to JSON" if body is None else "its hash is not that of what it holds"
            yield Violation(row=f"tool list {row.hash}", problem=problem, remedy="restore it from a backup")


def _unnamed(connection: sa.Connection, names: list[str]) -> set[str]:
    """Return the messages that nothing leads to; those that the next sweep looks at are not meant."""
    table, child = schema.messages, schema.messages.alias("child")
    query = sa.select(table.c.hash).where(
        table.c.hash.in_(names),
        ~sa.exists().where(child.c.parent == table.c.hash),
        ~sa.exists().where(schema.calls.c.retained_node == table.c.hash),
        ~sa.exists().where(schema.choices.c.reply_node == table.c.hash),
        ~sa.exists().where(schema.orphan_candidates.c.hash == table.c.hash),
    )
    return set(connection.scalars(query))


def _body(packed: bytes) -> bytes | None:
    """Return the JSON of a body; None if it is damaged."""
    try:
        body = unpack_body(bytes(packed))
        msgspec.json.decode(body, type=msgspec.Raw)
    except (zlib.error, msgspec.DecodeError):
        return None
    return body
