"""RoleResolver: which role each recorded call plays, read from the store, and which trajectories hold none that trains.

Consumes trajectories that wait to be grouped. Promises that a trajectory is looked at once, unless it went on
meanwhile, and an alarm where one after the other holds no role that trains. What a role is, `crediting/roles.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.reasons import DropReason
from ratchet.store.records import Call, Trajectory
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.rows.roles import Roles

_REMEMBERED = 10_000  # trajectories
_ALARM_AFTER = 32  # trajectories in a row without a role that trains


class RoleResolver:
    """The roles of one alias's traffic."""

    def __init__(self, store: Store, alias: str, roles: Roles) -> None:
        self._store = store
        self._alarm = f"no_role:{alias}"
        self.roles = roles
        self._seen: dict[tuple[str, float], bool] = {}  # whether a role that trains was in it
        self._without_role = self._dropped_in_a_row(alias) if roles.train else 0  # trajectories in a row

    def _dropped_in_a_row(self, alias: str) -> int:
        """Return how many of the newest trajectories in a row an earlier trainer put aside for their roles."""
        newest = self._store.trajectories.page(_ALARM_AFTER, chosen=TrajectoryFilter(alias=alias))
        waits = (TrajectoryState.OPEN, TrajectoryState.SEALED)
        seen = [run.drop_reason for run in newest if run.purpose == "live" and run.state not in waits]
        return len(list(takewhile(DropReason.OTHER_ROLE.__eq__, seen)))

    def named(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return the calls, each with its role."""
        return self.roles.named(calls, self._store.trajectories.system_prompt)

    def without(self, waiting: Sequence[Trajectory]) -> set[str]:
        """Return the ids of those in which no role that trains has spoken."""
        if not self.roles.train:
            return set()
        return {run.id for run in waiting if not self._has_trained_role(run)}

    def _has_trained_role(self, run: Trajectory) -> bool:
        key = (run.id, run.last_active_at)
        if key not in self._seen:
            while len(self._seen) >= _REMEMBERED:
                del self._seen[next(iter(self._seen))]
            calls = self.named(self._store.trajectories.read(run.id).calls)
            self._seen[key] = any(self.roles.trains(call.role) for call in calls)
            self._tell(self._seen[key], calls)
        return self._seen[key]

    def _tell(self, plays: bool, calls: Sequence[Call]) -> None:
        self._without_role = 0 if plays else self._without_role + 1
        if plays:
            self._store.alarms.clear(self._alarm)
        elif self._without_role >= _ALARM_AFTER:
            roles = ", ".join(sorted({call.role or "none" for call in calls}))
            self._store.alarms.raise_(
                self._alarm,
                f"the last {self._without_role} trajectories hold no call of the roles that train "
                f"({', '.join(self.roles.train)}); the last one's roles: {roles}; have agents send x-ratchet-role, or "
                "set trainer.role_patterns",
            )
