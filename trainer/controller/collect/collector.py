"""TrajectoryCollector: which sealed trajectories become groups, which get resamples first, and which are put aside.

Consumes the store's sealed trajectories; produces ready groups, drops with their reasons, and shadow calls. Who belongs
together is `grouping.py`'s to say, and of singles `cohorts.py`'s; what may be asked again is `shadowing`'s. A plan that
a call overtook is made anew.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache, partial
from hashlib import blake2b

from ratchet.store.errors import InvalidTransition
from ratchet.store.reasons import DropReason
from ratchet.store.records import RESAMPLE, Trajectory
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_load import load_of
from ratchet.trainer.controller.advantages.baseline import ScoreHistory
from ratchet.trainer.controller.collect.cohorts import likeness, plan_cohorts
from ratchet.trainer.controller.collect.feedback_wait import feedback_wait_of
from ratchet.trainer.controller.collect.grouping import GroupingPlan, PlannedGroup, plan_groups
from ratchet.trainer.controller.collect.resampling.resample_call import KEY_VARIABLE
from ratchet.trainer.controller.collect.resampling.resampler import Resampler
from ratchet.trainer.controller.collect.role_resolution import RoleResolver
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.tasks.held_out import is_held_out

log = logging.getLogger(__name__)

_MOST = 2000  # trajectories looked at in one turn
_PROMPTS = 10_000  # whose system prompts' digests are remembered


class TrajectoryCollector:
    """The groups of one alias, as they form."""

    def __init__(
        self,
        store: Store,
        settings: TrainerSettings,
        casting: RoleResolver,
        book: ScoreHistory,
        upstream_key: str | None,
    ) -> None:
        self._book = book
        self._prompt = lru_cache(_PROMPTS)(self._digest)
        self._store = store
        self._settings = settings
        self._role_resolver = casting
        self._patience = feedback_wait_of(settings.judge)
        self._resampler = Resampler(
            store, settings.model, settings.resample,
            least=settings.min_group_size,
            key=os.environ.get(KEY_VARIABLE),
            load=partial(load_of, settings.vllm, upstream_key),
        )  # fmt: skip

    def close(self) -> None:
        """Ask for no more resamples."""
        self._resampler.close()

    def turn(self, now: float, shipped: float) -> bool:
        """Form and drop what is due; return whether a group was formed."""
        alias, patience = self._settings.model, self._patience
        self._resampler.seal(shipped)
        silent_before = None if patience is None else shipped - patience.within_seconds
        waiting = self._store.trajectories.sealed(alias, _MOST, silent_before)
        company = self._resampler.look(waiting, shipped, now)
        plan = self._plan([run for run in waiting if run.id not in company.held and run.purpose != RESAMPLE], now)
        tired = now - self._settings.group_wait_seconds - self._settings.resample.max_wait_seconds
        kept = self._resampler.take(plan.alone, company.lonely, tired, now)
        cohorts, waits = self._cohorts([run for run in plan.alone if run.id not in kept], now)
        kept |= waits | {name for cohort in cohorts for name in cohort.members}
        plan = plan.settled(singles=self._settings.ungrouped != "drop", waiting=kept)
        whole = self._whole(GroupingPlan((*company.groups, *cohorts, *plan.groups), (*company.drops, *plan.drops)))
        try:
            self._apply_plan(whole, now)
        except (
            InvalidTransition
        ) as changed:  # a call came for one of them, which is open again: the next turn plans anew
            log.info("event=plan_overtaken reason=%r", str(changed))
        return bool(whole.groups)

    def _plan(self, waiting: list[Trajectory], now: float) -> GroupingPlan:
        settings, patience = self._settings, self._patience
        names = [run.id for run in waiting]
        spoken = self._store.feedback.first_value_at(names) if patience is not None else {}
        return plan_groups(
            waiting,
            silent={name for name in names if name not in spoken} if patience and patience.drops else frozenset(),
            ripe_at=spoken,
            abandoned=self._store.rollouts.abandoned(names),
            cut_off=self._store.trajectories.ended_by_failure(names) if names else frozenset(),
            size=settings.num_generations,
            least=settings.min_group_size,
            wait_seconds=settings.group_wait_seconds,
            now=now,
            held_out={run.id for run in waiting if is_held_out(run.group_key, settings.release.held_out_share)},
            other_role=self._role_resolver.without([run for run in waiting if run.purpose == "live"]),
            under_way=self._store.trajectories.open_attempts_like(settings.model, waiting),
        )

    def _whole(self, plan: GroupingPlan) -> GroupingPlan:
        """Return the plan; where a group has incomplete members only their drops: the next turn plans without them."""
        members = [name for group in plan.groups for name in group.members]
        torn = self._store.trajectories.incomplete(members)
        return GroupingPlan((), tuple((name, DropReason.INCOMPLETE) for name in sorted(torn))) if torn else plan

    def _cohorts(self, alone: list[Trajectory], now: float) -> tuple[list[PlannedGroup], set[str]]:
        """Return the cohorts that singles make, and who waits for one."""
        settings = self._settings
        if settings.ungrouped != "cohort" or not alone:
            return [], set()
        return plan_cohorts(
            alone,
            keys={run.id: likeness(run, self._prompt(run.root_node)) for run in alone},
            settled=self._book.ready(settings.min_baseline_samples),
            size=settings.num_generations,
            least=settings.min_group_size,
            wait_seconds=2 * settings.group_wait_seconds,  # they have waited once for attempts at the same
            now=now,
        )

    def _digest(self, root_node: str) -> bytes:
        return blake2b(self._store.trajectories.system_prompt(root_node).encode(), digest_size=8).digest()

    def _apply_plan(self, plan: GroupingPlan, now: float) -> None:
        for reason in {reason for _, reason in plan.drops}:
            self._store.trajectories.drop([name for name, why in plan.drops if why == reason], reason)
        for planned in plan.groups:
            self._store.groups.create(planned.key, planned.alias, planned.members, now)
