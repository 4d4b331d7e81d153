"""Lineage: which policy versions a trajectory is part of. Reads only.

A trajectory trains one round, and further ones may imitate it; their versions hold it, and every version that was
trained from those holds it as well, also where a version in between was rejected, since training goes on from the
newest committed round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.records import Policy, Round, family_of
from ratchet.store.records.base import Record, row_to
from ratchet.store.states import RoundState


class TrainingData(Record, frozen=True):
    """What a version was trained on, as far as it is still in the store.

    `rounds`, oldest first, are those that its weights hold; `judges` counts their trajectories by judge and version.
    """

    rounds: tuple[Round, ...]
    families: Mapping[str, int]
    judges: Mapping[tuple[str, str], int]


class Lineage:
    """The questions about lineage."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def versions_of(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the policies, as `alias@version`, that each trained trajectory is part of; the first learned from it.

        Trajectories that trained nothing are left out.
        """
        rounds, held = schema.rounds, _held_by(trajectory_ids).subquery()
        learnt = (
            sa.select(held.c.id, rounds.c.alias, rounds.c.to_version)
            .join(rounds, rounds.c.id == held.c.round_id)
            .order_by(rounds.c.to_version)
        )
        with read(self._engine) as connection:
            found = connection.execute(learnt).all()
            aliases = {row.alias for row in found}
            committed = sa.select(rounds.c.alias, rounds.c.from_version, rounds.c.to_version).where(
                rounds.c.alias.in_(aliases), rounds.c.state == RoundState.COMMITTED
            )
            steps = connection.execute(committed.order_by(rounds.c.to_version)).all() if aliases else []
        told: dict[str, dict[str, None]] = {}
        for row in found:
            pairs = [(step.from_version, step.to_version) for step in steps if step.alias == row.alias]
            names = {f"{row.alias}@{version}": None for version in descendants(pairs, row.to_version)}
            told.setdefault(row.id, {}).update(names)
        return {name: tuple(policies) for name, policies in told.items()}

    def training_data_of(self, policy: Policy) -> TrainingData:
        """Return what a version's weights hold: the rounds back to the base model, and their trajectories.

        A version that differs from another one by its prompt alone has the other's weights.
        """
        rounds, trajectories, verdicts, imitated = (
            schema.rounds,
            schema.trajectories,
            schema.verdicts,
            schema.sft_trajectories,
        )
        mine = sa.and_(rounds.c.alias == policy.alias, rounds.c.state == RoundState.COMMITTED)
        with read(self._engine) as connection:
            found = connection.execute(sa.select(rounds).where(mine, rounds.c.to_version <= policy.version)).all()
            chain = _chain([row_to(Round, row) for row in found], policy.adapter)
            names = [held.id for held in chain]
            learnt_from = sa.union(
                sa.select(trajectories.c.id).where(trajectories.c.round_id.in_(names)),
                sa.select(imitated.c.trajectory_id).where(imitated.c.round_id.in_(names)),
            ).subquery()
            latest = (
                sa.select(verdicts.c.trajectory_id, sa.func.max(verdicts.c.id).label("id"))
                .join(learnt_from, learnt_from.c.id == verdicts.c.trajectory_id)
                .where(verdicts.c.score.is_not(None))
                .group_by(verdicts.c.trajectory_id)
                .subquery()
            )
            judged = (
                sa.select(trajectories.c.task, trajectories.c.tools_hash, verdicts.c.judge, verdicts.c.judge_version)
                .join(latest, latest.c.trajectory_id == trajectories.c.id)
                .join(verdicts, verdicts.c.id == latest.c.id)
            )
            families: Counter[str] = Counter()
            judges: Counter[tuple[str, str]] = Counter()
            for row in connection.execute(judged):
                families[family_of(row.task, row.tools_hash)] += 1
                judges[row.judge, row.judge_version] += 1
        return TrainingData(rounds=tuple(chain), families=dict(families), judges=dict(judges))


def _chain(rounds: Sequence[Round], adapter: str | None) -> list[Round]:
    """Return the rounds from the base model to the one that made an adapter, oldest first."""
    made = {held.to_version: held for held in rounds}
    last = next((held for held in rounds if held.checkpoint == adapter), None)
    chain: list[Round] = []
    while last is not None:
        chain.append(last)
        last = made.get(last.from_version)
    return chain[::-1]


def descendants(steps: Sequence[tuple[int, int]], version: int) -> list[int]:
    """Return the version and all that were trained from it; `steps` are (from, to), the smaller `to` first."""
    held = {version: None}
    for origin, made in steps:
        if origin in held:
            held[made] = None
    return list(held)


def _held_by(trajectory_ids: Sequence[str]) -> sa.CompoundSelect[tuple[str, str]]:
    """Select (trajectory id, round_id) of the rounds that learned from trajectories."""
    trajectories, imitated = schema.trajectories, schema.sft_trajectories
    trained = sa.select(trajectories.c.id, trajectories.c.round_id).where(
        trajectories.c.id.in_(trajectory_ids), trajectories.c.round_id.is_not(None)
    )
    shown = sa.select(imitated.c.trajectory_id.label("id"), imitated.c.round_id)
    return trained.union_all(shown.where(imitated.c.trajectory_id.in_(trajectory_ids)))
