"""Lineage: which policy versions a trajectory is part of. Reads only.

A trajectory trains one round, whose version holds it; every version that was trained from that one holds it as well,
also where a version in between was rejected, since training goes on from the newest committed round.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from store import schema
from store.database import read
from store.states import RoundState


class Lineage:
    """The one question about lineage."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def of(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the policies, as `alias@version`, that each trained trajectory is part of; the first learned from it.

        Trajectories that trained nothing are left out.
        """
        runs, rounds = schema.trajectories, schema.rounds
        trained = (
            sa.select(runs.c.id, rounds.c.alias, rounds.c.to_version)
            .join(rounds, rounds.c.id == runs.c.round_id)
            .where(runs.c.id.in_(trajectory_ids))
        )
        with read(self._engine) as connection:
            found = connection.execute(trained).all()
            aliases = {row.alias for row in found}
            committed = sa.select(rounds.c.alias, rounds.c.from_version, rounds.c.to_version).where(
                rounds.c.alias.in_(aliases), rounds.c.state == RoundState.COMMITTED
            )
            steps = connection.execute(committed.order_by(rounds.c.to_version)).all() if aliases else []
        told: dict[str, tuple[str, ...]] = {}
        for row in found:
            pairs = [(step.from_version, step.to_version) for step in steps if step.alias == row.alias]
            told[row.id] = tuple(f"{row.alias}@{version}" for version in descendants(pairs, row.to_version))
        return told


def descendants(steps: Sequence[tuple[int, int]], version: int) -> list[int]:
    """Return the version and all that were trained from it; `steps` are (from, to), the smaller `to` first."""
    held = {version: None}
    for origin, made in steps:
        if origin in held:
            held[made] = None
    return list(held)
