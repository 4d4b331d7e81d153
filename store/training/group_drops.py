"""Drops many groups at once, with their members and a reason.

Guarantees: a drop is one transaction; groups that another process changed meanwhile are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES
from ratchet.store.db.engine import read, write
from ratchet.store.states import GroupState, PolicyState, TrajectoryState

_UNTRAINED_GROUPS = (GroupState.READY, GroupState.JUDGED)  # wait for a judge or a round
_UNTRAINED_TRAJECTORIES = (TrajectoryState.SEALED, TrajectoryState.GROUPED)  # wait for a group or a round


class GroupDrops:
    """Operations that drop several groups."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def drop_counts(self, alias: str | None = None) -> dict[str, int]:
        """Return the number of dropped groups, of one alias or of all, by reason."""
        groups = schema.groups
        chosen = [groups.c.alias == alias] if alias else []
        query = sa.select(groups.c.drop_reason, sa.func.count()).where(groups.c.drop_reason.is_not(None), *chosen)
        with read(self._engine) as connection:
            return {str(reason): int(n) for reason, n in connection.execute(query.group_by(groups.c.drop_reason))}

    def drop_rejected(self, alias: str, reason: str) -> int:
        """Drop untrained trajectories of rejected versions; return their number.

        Groups continue without these members; empty groups are dropped too.
        """
        groups, trajectories, policies = schema.groups, schema.trajectories, schema.policies
        rejected = sa.select(policies.c.version).where(
            policies.c.alias == alias, policies.c.state == PolicyState.REJECTED
        )
        waiting = trajectories.c.state.in_(_UNTRAINED_TRAJECTORIES)
        theirs = sa.and_(trajectories.c.alias == alias, waiting, trajectories.c.version.in_(rejected))
        left = sa.exists().where(
            trajectories.c.group_id == groups.c.id, trajectories.c.state != TrajectoryState.DROPPED
        )
        open_ones = sa.and_(groups.c.alias == alias, groups.c.state.in_(_UNTRAINED_GROUPS))
        with write(self._engine) as connection:
            dropped = connection.execute(
                sa.update(trajectories).where(theirs).values(state=TrajectoryState.DROPPED, drop_reason=reason)
            ).rowcount
            if dropped:
                emptied = sa.update(groups).where(open_ones, ~left)
                connection.execute(emptied.values(state=GroupState.DROPPED, drop_reason=reason))
        return dropped

    def drop_members(self, trajectory_ids: Sequence[str], reason: str) -> int:
        """Drop those of these trajectories that were not trained yet; return their number.

        Groups that lose their last member are dropped too.
        """
        groups, trajectories = schema.groups, schema.trajectories
        dropped = 0
        for start in range(0, len(trajectory_ids), MAX_IN_VALUES):
            names = trajectory_ids[start : start + MAX_IN_VALUES]
            mine = sa.and_(trajectories.c.id.in_(names), trajectories.c.state.in_(_UNTRAINED_TRAJECTORIES))
            theirs = sa.select(trajectories.c.group_id).where(trajectories.c.id.in_(names))
            left = sa.exists().where(
                trajectories.c.group_id == groups.c.id, trajectories.c.state != TrajectoryState.DROPPED
            )
            emptied = sa.and_(groups.c.id.in_(theirs), groups.c.state.in_(_UNTRAINED_GROUPS), ~left)
            with write(self._engine) as connection:
                dropped += connection.execute(
                    sa.update(trajectories).where(mine).values(state=TrajectoryState.DROPPED, drop_reason=reason)
                ).rowcount
                connection.execute(
                    sa.update(groups).where(emptied).values(state=GroupState.DROPPED, drop_reason=reason)
                )
        return dropped

    def drop_stale(self, alias: str, version: int, reason: str, serving: Sequence[int] = ()) -> int:
        """Drop untrained groups of an alias with a member sampled before `version`; return their number.

        Members that were dropped before do not count. Those of a version that is `serving` do not either: once their
        group is judged, they alone are dropped.
        """
        groups, trajectories = schema.groups, schema.trajectories
        is_old = sa.and_(trajectories.c.version < version, trajectories.c.state == TrajectoryState.GROUPED)
        old = (
            sa.select(groups.c.id)
            .join(trajectories, trajectories.c.group_id == groups.c.id)
            .where(groups.c.alias == alias, groups.c.state.in_(_UNTRAINED_GROUPS), is_old)
            .where(trajectories.c.version.not_in(serving))
            .distinct()
        )
        judged = (
            sa.select(trajectories.c.id)
            .join(groups, trajectories.c.group_id == groups.c.id)
            .where(groups.c.alias == alias, groups.c.state == GroupState.JUDGED, is_old)
            .where(trajectories.c.version.in_(serving))
        )
        with read(self._engine) as connection:
            found, members = list(connection.scalars(old)), list(connection.scalars(judged))
        self.drop_members(members, reason)
        if not found:
            return 0
        with write(self._engine) as connection:
            return sum(
                _drop_untrained(connection, found[start : start + MAX_IN_VALUES], reason)
                for start in range(0, len(found), MAX_IN_VALUES)
            )


def _drop_untrained(connection: sa.Connection, group_ids: Sequence[str], reason: str) -> int:
    """Drop the untrained ones of these groups, with their members; return their number."""
    groups, trajectories = schema.groups, schema.trajectories
    open_ones = sa.and_(groups.c.id.in_(group_ids), groups.c.state.in_(_UNTRAINED_GROUPS))
    values = {"state": GroupState.DROPPED, "drop_reason": reason}
    dropped = list(connection.scalars(sa.update(groups).where(open_ones).values(**values).returning(groups.c.id)))
    grouped = sa.and_(trajectories.c.group_id.in_(dropped), trajectories.c.state == TrajectoryState.GROUPED)
    connection.execute(sa.update(trajectories).where(grouped).values(state=TrajectoryState.DROPPED, drop_reason=reason))
    return len(dropped)
