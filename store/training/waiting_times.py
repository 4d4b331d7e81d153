"""How long trajectories wait on their way from the first call to a version that was trained on them. Reads only.

The stages follow each other: the agent works, its trajectory is sealed and grouped, the group is judged, waits for a
round, is trained, and the new version is proven on the replicas until it serves. Each is measured over the newest
`SAMPLE` trained trajectories, or the newest `SAMPLE_ROUNDS` committed rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.records.base import Record
from ratchet.store.states import PolicyAction, RoundState, TrajectoryState
from ratchet.store.statistics import nearest_rank

SAMPLE = 1000  # trajectories
SAMPLE_ROUNDS = 200
_SERVES = (PolicyAction.RAMP, PolicyAction.PROMOTE)


class WaitingTime(Record, frozen=True):
    """Percentiles of a stage in seconds; `count` measurements."""

    stage: str
    count: int
    p50: float
    p90: float
    p99: float


class WaitingTimes:
    """Queries on waiting times."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def stages(self, alias: str) -> list[WaitingTime]:
        """Return the stages of an alias in order, without those that were never reached.

        rollout: first to last call; sealing: until no further call is expected; grouping: until the other attempts have
        ended; judging: until the verdict; round: until the learner begins; training: the round; serving: until the new
        version serves; learner_idle: from the end of a round to the start of the next one.
        """
        with read(self._engine) as connection:
            found = _of_trajectories(connection, alias) | _of_rounds(connection, alias)
        return [_percentiles(stage, values) for stage, values in found.items() if values]


def _of_trajectories(connection: sa.Connection, alias: str) -> dict[str, list[float]]:
    trajectories, groups, rounds, verdicts = schema.trajectories, schema.groups, schema.rounds, schema.verdicts
    mine = sa.and_(trajectories.c.alias == alias, trajectories.c.state == TrajectoryState.TRAINED)
    newest = sa.select(trajectories).where(mine).order_by(trajectories.c.opened_at.desc()).limit(SAMPLE).subquery()
    given = sa.and_(verdicts.c.trajectory_id == newest.c.id, verdicts.c.score.is_not(None))
    judged = sa.select(sa.func.min(verdicts.c.judged_at)).where(given, verdicts.c.judged_at >= groups.c.formed_at)
    query = (
        sa.select(
            newest.c.opened_at, newest.c.last_active_at, newest.c.sealed_at, groups.c.formed_at,
            judged.scalar_subquery().label("judged_at"), rounds.c.started_at,
        )
        .join(groups, groups.c.id == newest.c.group_id)
        .join(rounds, rounds.c.id == newest.c.round_id)
    )  # fmt: skip
    stages: dict[str, list[float]] = {name: [] for name in ("rollout", "sealing", "grouping", "judging", "round")}
    for row in connection.execute(query):
        times = (row.opened_at, row.last_active_at, row.sealed_at, row.formed_at, row.judged_at, row.started_at)
        for stage, begin, end in zip(stages, times, times[1:], strict=False):
            if begin is not None and end is not None:
                stages[stage].append(max(0.0, end - begin))
    return stages


def _of_rounds(connection: sa.Connection, alias: str) -> dict[str, list[float]]:
    rounds, decisions = schema.rounds, schema.decisions
    committed = sa.and_(rounds.c.alias == alias, rounds.c.state == RoundState.COMMITTED)
    newest = sa.select(rounds).where(committed).order_by(rounds.c.started_at.desc()).limit(SAMPLE_ROUNDS)
    first = (
        sa.select(decisions.c.version, sa.func.min(decisions.c.decided_at))
        .where(decisions.c.alias == alias, decisions.c.action.in_(_SERVES))
        .group_by(decisions.c.version)
    )
    found = connection.execute(newest).all()[::-1]
    served = {row[0]: float(row[1]) for row in connection.execute(first)}
    ends = [(row, row.ended_at) for row in found if row.ended_at is not None]
    return {
        "training": [max(0.0, end - row.started_at) for row, end in ends],
        "serving": [max(0.0, served[row.to_version] - end) for row, end in ends if row.to_version in served],
        "learner_idle": [max(0.0, later.started_at - end) for (_, end), (later, _) in itertools.pairwise(ends)],
    }


def _percentiles(stage: str, values: Sequence[float]) -> WaitingTime:
    ordered = sorted(values)
    p50, p90, p99 = (nearest_rank(ordered, share) for share in (0.5, 0.9, 0.99))
    return WaitingTime(stage=stage, count=len(ordered), p50=p50, p90=p90, p99=p99)
