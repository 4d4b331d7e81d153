"""Lineage: the policy versions that were trained on a trajectory. Reads only.

A trajectory is trained in one round, and may be a demonstration in others. The versions of these rounds and all their
descendants, forks included, contain it, even if a version in between was rejected, because training continues from the
newest committed round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.policies.forks import FORKED_FROM, forks
from ratchet.store.records import Policy, Round, family_of
from ratchet.store.records.base import Record, row_to
from ratchet.store.states import RoundState

Name = TypeVar("Name")  # of a version


class TrainingData(Record, frozen=True):
    """The training data of a version that is still in the store.

    `rounds`: behind its weights, oldest first; `families` and `judges`: counts of their trajectories.
    """

    rounds: tuple[Round, ...]
    families: Mapping[str, int]
    judges: Mapping[tuple[str, str], int]


class Lineage:
    """Queries on lineage."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def versions_of(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the versions (`alias@version`) that contain each trajectory; the first was trained on it directly.

        Untrained trajectories are left out.
        """
        rounds, held = schema.rounds, _held_by(trajectory_ids).subquery()
        direct = (
            sa.select(held.c.id, rounds.c.alias, rounds.c.to_version)
            .join(rounds, rounds.c.id == held.c.round_id)
            .order_by(rounds.c.to_version)
        )
        with read(self._engine) as connection:
            found = connection.execute(direct).all()
            aliases = {row.alias for row in found}
            copies = forks(connection) if found else {}
            # A copy may have been forked again: with any fork all agents are read.
            wanted = sa.true() if copies else rounds.c.alias.in_(aliases)
            committed = sa.select(rounds.c.alias, rounds.c.from_version, rounds.c.to_version).where(
                wanted, rounds.c.state == RoundState.COMMITTED
            )
            steps = connection.execute(committed.order_by(rounds.c.id)).all() if aliases else []
        pairs = [
            (copies.get((step.alias, step.to_version), (step.alias, step.from_version)), (step.alias, step.to_version))
            for step in steps
        ]
        versions: dict[str, dict[str, None]] = {}
        for row in found:
            held_in = descendants(pairs, (row.alias, row.to_version))
            names = {f"{alias}@{version}": None for alias, version in held_in}
            versions.setdefault(row.id, {}).update(names)
        return {name: tuple(policies) for name, policies in versions.items()}

    def training_data_of(self, policy: Policy) -> TrainingData:
        """Return the rounds behind a version's weights, back to the base model, and their trajectories.

        Versions that differ only by their prompt share their weights.
        """
        trajectories, verdicts, imitated = (
            schema.trajectories,
            schema.verdicts,
            schema.sft_trajectories,
        )
        with read(self._engine) as connection:
            chain = _rounds_behind(connection, policy.alias, policy.version, policy.adapter)
            names = [held.id for held in chain]
            trained_on = sa.union(
                sa.select(trajectories.c.id).where(trajectories.c.round_id.in_(names)),
                sa.select(imitated.c.trajectory_id).where(imitated.c.round_id.in_(names)),
            ).subquery()
            latest = (
                sa.select(verdicts.c.trajectory_id, sa.func.max(verdicts.c.id).label("id"))
                .join(trained_on, trained_on.c.id == verdicts.c.trajectory_id)
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


def _rounds_behind(connection: sa.Connection, alias: str, version: int, adapter: str | None) -> list[Round]:
    """Return the rounds behind an adapter, oldest first; behind a fork those of the version that it is a copy of."""
    rounds, policies = schema.rounds, schema.policies
    mine = sa.and_(rounds.c.alias == alias, rounds.c.state == RoundState.COMMITTED)
    found = connection.execute(sa.select(rounds).where(mine, rounds.c.to_version <= version)).all()
    chain = _chain([row_to(Round, row) for row in found], adapter)
    source = chain[0].metrics.get(FORKED_FROM) if chain else None
    if source is None:
        return chain
    copied = sa.and_(policies.c.alias == source["alias"], policies.c.version == source["version"])
    origin = connection.scalar(sa.select(policies.c.adapter).where(copied))
    return _rounds_behind(connection, source["alias"], source["version"], origin) + chain


def _chain(rounds: Sequence[Round], adapter: str | None) -> list[Round]:
    """Return the rounds from the base model to the one that made an adapter, oldest first."""
    made = {held.to_version: held for held in rounds}
    last = next((held for held in rounds if held.checkpoint == adapter), None)
    chain: list[Round] = []
    while last is not None:
        chain.append(last)
        last = made.get(last.from_version)
    return chain[::-1]


def descendants(steps: Sequence[tuple[Name, Name]], version: Name) -> list[Name]:
    """Return a version and its descendants; `steps`: (from, to), in the order in which they were made."""
    held = {version: None}
    for origin, made in steps:
        if origin in held:
            held[made] = None
    return list(held)


def _held_by(trajectory_ids: Sequence[str]) -> sa.CompoundSelect[tuple[str, str]]:
    """Return the query for (trajectory id, round id) of the rounds trained on trajectories."""
    trajectories, imitated = schema.trajectories, schema.sft_trajectories
    trained = sa.select(trajectories.c.id, trajectories.c.round_id).where(
        trajectories.c.id.in_(trajectory_ids), trajectories.c.round_id.is_not(None)
    )
    demonstrated = sa.select(imitated.c.trajectory_id.label("id"), imitated.c.round_id)
    return trained.union_all(demonstrated.where(imitated.c.trajectory_id.in_(trajectory_ids)))
