"""Writes verdicts, and groups that come with their scores: a caller trains them on request.

Guarantees: all groups of a request are formed, scored and ready for a round in one transaction, or none; verdicts are
only added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import truncate_row
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidTransition
from ratchet.store.ids import new_id
from ratchet.store.records import GATHERED, JudgeRequest, Verdict
from ratchet.store.states import FINISH, GroupState, TrajectoryState

_UNGROUPED = (TrajectoryState.OPEN, TrajectoryState.SEALED)


class ScoredGroups:
    """Operations on groups that come with their scores."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def create_scored(self, alias: str, groups: Mapping[str, Sequence[Verdict]], now: float) -> list[str]:
        """Form groups of gathered trajectories by key, each with the verdicts of its members; return their ids.

        They wait for a round. Raises InvalidTransition if a member is not a gathered trajectory of the alias, or was
        trained or dropped; then nothing is written.
        """
        created: list[str] = []
        with write(self._engine) as connection:
            for key, verdicts in groups.items():
                group = new_id("grp")
                connection.execute(
                    sa.insert(schema.groups).values(
                        id=group, key=key, alias=alias, state=GroupState.JUDGED, formed_at=now
                    )
                )
                _take(connection, alias, group, [one.trajectory_id for one in verdicts], now)
                add_verdicts(connection, [msgspec.structs.replace(one, group_id=group) for one in verdicts], ())
                created.append(group)
        return created

    def count_gathered(self) -> int:
        """Return the number of sealed trajectories that are grouped and trained on request only."""
        table = schema.trajectories
        waiting = (table.c.state == TrajectoryState.SEALED, table.c.purpose == GATHERED)
        with read(self._engine) as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(table).where(*waiting)) or 0)


def _take(connection: sa.Connection, alias: str, group: str, members: Sequence[str], now: float) -> None:
    """Seal the members that are open, and put all of them into the group."""
    trajectories = schema.trajectories
    mine = sa.and_(
        trajectories.c.id.in_(members), trajectories.c.alias == alias, trajectories.c.purpose == GATHERED,
        trajectories.c.state.in_(_UNGROUPED),
    )  # fmt: skip
    sealed_at = sa.func.coalesce(trajectories.c.sealed_at, now)
    taken = connection.execute(
        sa.update(trajectories)
        .where(mine)
        .values(state=TrajectoryState.GROUPED, group_id=group, sealed_at=sealed_at, sealed_by=FINISH)
    )
    if taken.rowcount != len(members):
        raise InvalidTransition(
            f"{len(members) - taken.rowcount} of {len(members)} members are no gathered trajectories of {alias}, or "
            "were trained or dropped"
        )


def add_verdicts(
    connection: sa.Connection, verdicts: Sequence[Verdict], judge_requests: Sequence[JudgeRequest]
) -> None:
    """Add verdicts, and the requests of judges behind them, in the caller's transaction."""
    if judge_requests:
        requests = [truncate_row(schema.judge_requests, msgspec.structs.asdict(one)) for one in judge_requests]
        connection.execute(sa.insert(schema.judge_requests), requests)
    rows: list[dict[str, Any]] = [
        truncate_row(schema.verdicts, msgspec.structs.asdict(verdict)) | {"components": dict(verdict.components)}
        for verdict in verdicts
    ]
    if rows:
        connection.execute(sa.insert(schema.verdicts), rows)
