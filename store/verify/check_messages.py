"""Checks messages and tool lists: they decode, match their hash, and have a reference."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.message_paths import unnamed_messages
from ratchet.store.content.messages import ROOT, is_intact, is_intact_toolset
from ratchet.store.db import schema
from ratchet.store.db.column_types import NOT_DECODED, unpack_body
from ratchet.store.errors import RecordDamaged
from ratchet.store.records import MessageNode
from ratchet.store.verify.violation import Page, Violation, existing_values

_LOST = "restore it from a backup; transcripts that contain it are incomplete, tokens are not affected"
_LEFT = "nothing is lost: the next `ratchet store prune` deletes it"


def check_messages(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that messages match their hash, have their parent, and have a reference."""
    there = existing_values(connection, schema.messages.c.hash, {row.parent for row in page} - {ROOT})
    orphans = _orphans(connection, [row.hash for row in page])
    for row in page:
        name = f"message {row.hash}"
        body = _body(row.body)
        if body is None:
            yield Violation(row=name, problem="its body does not inflate to JSON", remedy=_LOST)
        elif not is_intact(MessageNode(hash=row.hash, parent=row.parent, role=row.role, body=body)):
            yield Violation(row=name, problem="its hash does not match its parent and body", remedy=_LOST)
        if row.parent != ROOT and row.parent not in there:
            yield Violation(row=name, problem=f"its parent {row.parent} is missing", remedy=_LOST)
        if row.hash in orphans:
            yield Violation(row=name, problem="no call, answer or message names it", remedy=_LEFT)


def check_toolsets(_: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that tool lists match their hash."""
    for row in page:
        body = _body(row.body)
        if body is None or not is_intact_toolset(row.hash, body):
            problem = "it does not inflate to JSON" if body is None else "its hash does not match its content"
            yield Violation(row=f"tool list {row.hash}", problem=problem, remedy="restore it from a backup")


def _orphans(connection: sa.Connection, names: list[str]) -> set[str]:
    """Return the messages without a reference, except candidates of the next sweep."""
    return unnamed_messages(connection, names).keys() - existing_values(
        connection, schema.orphan_candidates.c.hash, names
    )


def _body(packed: bytes) -> bytes | None:
    """Return the JSON of a body; None if it is damaged."""
    try:
        body = unpack_body(bytes(packed))
        msgspec.json.decode(body, type=msgspec.Raw)
    except (RecordDamaged, *NOT_DECODED):
        return None
    return body
