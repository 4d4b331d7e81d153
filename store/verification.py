"""Verification: does every stored message still have the hash of its parent and content, and does its parent exist?

Reads only, in the order of the primary key, a page at a time; works beside a running project.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from store import schema
from store.database import connect, ensure_schema, read
from store.messages import ROOT, is_intact
from store.records import MessageNode

_PAGE = 2_000


@dataclass(frozen=True, slots=True)
class Findings:
    """What was looked at, and the hashes of the messages that are not what they were or hang in the air."""

    messages: int
    damaged: tuple[str, ...]
    orphaned: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return not self.damaged and not self.orphaned


def verify(store_url: str) -> Findings:
    """Re-derive every message's hash. Raises StoreError where the database cannot be read."""
    engine = connect(store_url)
    try:
        ensure_schema(engine)
        count, damaged, orphaned = 0, [], []
        for node in _messages(engine):
            count += 1
            if not is_intact(node):
                damaged.append(node.hash)
        orphaned = _orphans(engine)
    finally:
        engine.dispose()
    return Findings(count, tuple(damaged), tuple(orphaned))


def _messages(engine: sa.Engine) -> Iterator[MessageNode]:
    table, last = schema.messages, ""
    while True:
        with read(engine) as connection:
            page = connection.execute(
                sa.select(table).where(table.c.hash > last).order_by(table.c.hash).limit(_PAGE)
            ).all()
        for row in page:
            yield MessageNode(hash=row.hash, parent=row.parent, role=row.role, body=row.body)
        if len(page) < _PAGE:
            return
        last = page[-1].hash


def _orphans(engine: sa.Engine) -> list[str]:
    table = schema.messages
    parents = table.alias("parents")
    missing = sa.select(table.c.hash).where(
        table.c.parent != ROOT, ~sa.exists().where(parents.c.hash == table.c.parent)
    )
    with read(engine) as connection:
        return list(connection.scalars(missing))
