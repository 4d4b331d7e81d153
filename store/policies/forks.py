"""Forks: which version of which agent a version is a copy of. A fork is recorded by the round that committed it."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.states import RoundState

FORKED_FROM = "forked_from"  # in the metrics of the round

Version = tuple[str, int]  # alias, number


def forks(connection: sa.Connection) -> dict[Version, Version]:
    """Return the version that each forked version is a copy of."""
    rounds = schema.rounds
    adopted = sa.select(rounds.c.alias, rounds.c.to_version, rounds.c.metrics).where(
        rounds.c.state == RoundState.COMMITTED, rounds.c.reason.is_not(None)
    )
    origins = ((row, row.metrics.get(FORKED_FROM)) for row in connection.execute(adopted))
    return {(row.alias, row.to_version): (one["alias"], one["version"]) for row, one in origins if one}
