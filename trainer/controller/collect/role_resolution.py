"""RoleResolver: the role of each recorded call, and which trajectories have no call of a trained role.

Consumes trajectories that wait for a group. Promises: each trajectory is read once, unless it continues; many in a row
without a trained role raise an alarm. `rows/roles.py` defines what a role is.
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

_MAX_CACHED = 10_000  # trajectories
_ALARM_AFTER = 32  # trajectories in a row without a trained role


class RoleResolver:
    """The roles in one alias's traffic."""

    def __init__(self, store: Store, alias: str, roles: Roles) -> None:
        self._store = store
        self._alarm = f"no_role:{alias}"
        self.roles = roles
        self._has_role: dict[tuple[str, float], bool] = {}  # by trajectory and its last activity
        self._without_role = self._dropped_in_a_row(alias) if roles.train else 0  # trajectories in a row

    def with_roles(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return the calls, each with its role."""
        return self.roles.named(calls, self._store.trajectories.system_prompt)

    def without_trained_role(self, trajectories: Sequence[Trajectory]) -> set[str]:
        """Return the ids of the trajectories that have no call of a trained role."""
        if not self.roles.train:
            return set()
        return {one.id for one in trajectories if not self._has_trained_role(one)}

    def _dropped_in_a_row(self, alias: str) -> int:
        """Return how many of the newest trajectories in a row an earlier trainer dropped for their roles."""
        newest = self._store.trajectories.page(_ALARM_AFTER, chosen=TrajectoryFilter(alias=alias))
        undecided = (TrajectoryState.OPEN, TrajectoryState.SEALED)
        reasons = [one.drop_reason for one in newest if one.purpose == "live" and one.state not in undecided]
        return len(list(takewhile(DropReason.OTHER_ROLE.__eq__, reasons)))

    def _has_trained_role(self, trajectory: Trajectory) -> bool:
        key = (trajectory.id, trajectory.last_active_at)
        if key not in self._has_role:
            while len(self._has_role) >= _MAX_CACHED:
                del self._has_role[next(iter(self._has_role))]
            calls = self.with_roles(self._store.trajectories.read(trajectory.id).calls)
            self._has_role[key] = any(self.roles.trains(call.role) for call in calls)
            self._update_alarm(self._has_role[key], calls)
        return self._has_role[key]

    def _update_alarm(self, has_role: bool, calls: Sequence[Call]) -> None:
        self._without_role = 0 if has_role else self._without_role + 1
        if has_role:
            self._store.alarms.clear(self._alarm)
        elif self._without_role >= _ALARM_AFTER:
            roles = ", ".join(sorted({call.role or "none" for call in calls}))
            self._store.alarms.raise_(
                self._alarm,
                f"the last {self._without_role} trajectories hold no call of the roles that train "
                f"({', '.join(self.roles.train)}); the last one's roles: {roles}; have agents send x-ratchet-role, or "
                "set trainer.role_patterns",
            )
