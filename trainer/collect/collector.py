"""The collector: seals and groups trajectories, waits for feedback, and resolves the roles of their calls."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile

from ratchet.store.access.replicas import ReplicaList
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.coordination import ALL_KINDS, PROXY_TIMEOUT_SECONDS, ActivityKind
from ratchet.store.errors import InvalidTransition
from ratchet.store.reasons import DropReason
from ratchet.store.records import RESAMPLE, Call, Trajectory
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import load_of
from ratchet.trainer.advantages import ScoreHistory
from ratchet.trainer.collect.grouping import (
    GroupingPlan,
    PlannedGroup,
    cohort_key,
    plan_cohorts,
    plan_groups,
)
from ratchet.trainer.collect.resampler import KEY_VARIABLE, Resampler
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.settings.judge_specs import DROP, ByFamilySpec, CompositeSpec, FeedbackSpec, JudgeSpec
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.tasks import is_held_out

# FeedbackWait: whether a judge needs human feedback, how long a trajectory waits for it, and what happens then.
# Pure.


@dataclass(frozen=True, slots=True)
class FeedbackWait:
    """Wait `within_seconds` after the last call; then drop a trajectory without feedback, or judge it without."""

    within_seconds: float
    drops: bool


def feedback_wait_of(spec: JudgeSpec) -> FeedbackWait | None:
    """Return the wait that a judge needs, of several parts the longest; None if it needs no feedback."""
    specs = _feedback_specs(spec)
    if not specs:
        return None
    return FeedbackWait(max(one.within_seconds for one in specs), any(one.missing == DROP for one in specs))


def _feedback_specs(spec: JudgeSpec) -> list[FeedbackSpec]:
    if isinstance(spec, FeedbackSpec):
        return [spec]
    if isinstance(spec, CompositeSpec):
        return [found for part in spec.parts for found in _feedback_specs(part.judge)]
    if isinstance(spec, ByFamilySpec):
        return [found for judge in spec.all for found in _feedback_specs(judge)]
    return []


# RoleResolver: the role of each recorded call, and which trajectories have no call of a trained role.
#
# Consumes trajectories that wait for a group. Promises: each trajectory is read once, unless it continues; many in a
# row without a trained role raise an alarm. `rows/token_row.py` defines what a role is.

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


# TrajectoryCollector: seals trajectories; which of them become groups, get resamples first, or are dropped.
#
# Consumes open and sealed trajectories; produces ready groups, drops with their reasons, and resampling calls.
# `grouping.py` decides which trajectories belong together, also of the ungrouped ones, and `resampling` which prompts
# can be sampled again. A plan that a new call overtakes is made again in the next step.

log = logging.getLogger(__name__)

_COLLECTED = frozenset({ActivityKind.IDLE, ActivityKind.ENDED, ActivityKind.SEALED})
_MAX_TRAJECTORIES = 2000  # read in one step
_MAX_PROMPT_DIGESTS = 10_000


class TrajectoryCollector:
    """Forms the groups of one alias."""

    def __init__(
        self,
        store: Store,
        settings: TrainerSettings,
        role_resolver: RoleResolver,
        history: ScoreHistory,
        upstream_key: str | None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._role_resolver = role_resolver
        self._history = history
        self._prompt_digest = lru_cache(_MAX_PROMPT_DIGESTS)(self._read_prompt_digest)
        replicas = ReplicaList(settings.vllm)
        self._feedback_wait = feedback_wait_of(settings.judge)
        self._resampler = Resampler(
            store, settings.model, settings.resample,
            min_group_size=settings.min_group_size,
            key=os.environ.get(KEY_VARIABLE),
            read_load=lambda: load_of(replicas.resolve(), upstream_key),
        )  # fmt: skip

    @property
    def is_resampling(self) -> bool:
        return self._resampler.is_waiting

    def close(self) -> None:
        self._resampler.close()

    def seal(self, now: float, waiting: Set[str] = ALL_KINDS) -> float | None:
        """Seal what is complete; return the time up to which all records are stored, None if `step` has nothing to do.

        `waiting`: the kinds of activity that the store may hold for this agent.
        """
        if waiting.isdisjoint(_COLLECTED) and not self._resampler.is_waiting:
            return None
        # Idle time is measured by what the proxies have shipped, not by the clock: records may be on their way.
        alias, trajectories = self._settings.model, self._store.trajectories
        shipped = self._store.proxy_instances.shipped_until(alias, now, since=now - PROXY_TIMEOUT_SECONDS)
        if ActivityKind.ENDED in waiting:
            trajectories.seal_rollouts(alias, shipped)
        if ActivityKind.IDLE in waiting:
            trajectories.seal_idle_trajectories(alias, shipped, self._settings.seal_after_idle_seconds)
        return shipped

    def step(self, now: float, shipped: float) -> bool:
        """Form and drop what is due; return whether a group was formed. `shipped`: all records up to then are
        stored.
        """
        alias, feedback_wait = self._settings.model, self._feedback_wait
        self._resampler.seal(shipped)
        silent_before = None if feedback_wait is None else shipped - feedback_wait.within_seconds
        sealed = self._store.trajectories.sealed(alias, _MAX_TRAJECTORIES, silent_before)
        if not sealed and not self._resampler.is_waiting:
            return False
        resampled = self._resampler.collect_results(sealed, shipped, now)
        plan = self._plan([one for one in sealed if one.id not in resampled.waiting and one.purpose != RESAMPLE], now)
        expired_before = now - self._settings.group_wait_seconds - self._settings.resample.max_wait_seconds
        waiting = self._resampler.plan(plan.ungrouped, resampled.unmatched, expired_before, now)
        cohorts, in_cohorts = self._plan_cohorts([one for one in plan.ungrouped if one.id not in waiting], now)
        waiting |= in_cohorts | {name for cohort in cohorts for name in cohort.members}
        plan = plan.with_ungrouped(keep=self._settings.ungrouped != "drop", waiting=waiting)
        complete = self._without_incomplete(
            GroupingPlan((*resampled.groups, *cohorts, *plan.groups), (*resampled.drops, *plan.drops))
        )
        try:
            self._apply(complete, now)
        except InvalidTransition as changed:  # a call reopened a trajectory: the next step plans again
            log.info("event=plan_overtaken reason=%r", str(changed))
        return bool(complete.groups)

    def _plan(self, sealed: list[Trajectory], now: float) -> GroupingPlan:
        settings, feedback_wait = self._settings, self._feedback_wait
        names = [one.id for one in sealed]
        given_at = self._store.feedback.first_value_at(names) if feedback_wait is not None else {}
        drops_silent = feedback_wait is not None and feedback_wait.drops
        return plan_groups(
            sealed,
            without_feedback={name for name in names if name not in given_at} if drops_silent else frozenset(),
            judgeable_at=given_at,
            abandoned=self._store.rollouts.abandoned(names),
            cut_off=self._store.trajectories.ended_by_failure(names) if names else frozenset(),
            size=1 if settings.learner.objective.distillation else settings.num_generations,  # nothing is compared
            min_size=1 if settings.learner.objective.distillation else settings.min_group_size,
            wait_seconds=settings.group_wait_seconds,
            now=now,
            held_out={one.id for one in sealed if is_held_out(one.group_key, settings.release.held_out_share)},
            other_role=self._role_resolver.without_trained_role([one for one in sealed if one.purpose == "live"]),
            under_way=self._store.trajectories.open_attempts_like(settings.model, sealed),
        )

    def _without_incomplete(self, plan: GroupingPlan) -> GroupingPlan:
        """Return the plan; if groups have incomplete members, only their drops: the next step plans without them."""
        members = [name for group in plan.groups for name in group.members]
        incomplete = self._store.trajectories.incomplete(members)
        if not incomplete:
            return plan
        return GroupingPlan((), tuple((name, DropReason.INCOMPLETE) for name in sorted(incomplete)))

    def _plan_cohorts(self, ungrouped: list[Trajectory], now: float) -> tuple[list[PlannedGroup], set[str]]:
        """Return the cohorts of ungrouped trajectories, and the ids of those that wait for one."""
        settings = self._settings
        if settings.ungrouped != "cohort" or not ungrouped:
            return [], set()
        return plan_cohorts(
            ungrouped,
            keys={one.id: cohort_key(one, self._prompt_digest(one.root_node)) for one in ungrouped},
            with_baseline=self._history.families_with_baseline(settings.min_baseline_samples),
            size=settings.num_generations,
            min_size=settings.min_group_size,
            wait_seconds=2 * settings.group_wait_seconds,  # they have waited once for attempts at the same task
            now=now,
        )

    def _read_prompt_digest(self, root_node: str) -> bytes:
        return blake2b(self._store.trajectories.system_prompt(root_node).encode(), digest_size=8).digest()

    def _apply(self, plan: GroupingPlan, now: float) -> None:
        for reason in {reason for _, reason in plan.drops}:
            self._store.trajectories.drop([name for name, why in plan.drops if why == reason], reason)
        for planned in plan.groups:
            self._store.groups.create(planned.key, planned.alias, planned.members, now)
