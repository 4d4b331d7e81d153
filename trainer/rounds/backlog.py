"""The backlog of judged groups: how old a sample may be, which groups a round takes, and which are dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.reasons import DropReason
from ratchet.store.records import BASE_VERSION, Group, Policy
from ratchet.store.states import SERVING, GroupState, PolicyState, RoundState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.settings.trainer_settings import TrainerSettings

# How old a sample may be, counted in trained versions. Pure.
#
# A prompt version changes no weights, and a rejected version is not part of later ones: neither makes a sample older.
# An unproven version does: it serves nobody, but training continues from it, so each one leads further away from the
# version that sampled. What was trained decides here, not what a proof could tell from rounding: without them, the
# learner would hold what an old version sampled to the limit for fresh rows, and reject it.


def oldest_fresh(policies: Sequence[Policy], max_staleness: int) -> int:
    """Return the oldest version whose samples are trained: `max_staleness` trained versions before the newest one."""
    steps, left = _steps(policies), max_staleness
    version = max(steps, default=BASE_VERSION)
    while version > BASE_VERSION and (left > 0 or version not in steps):
        left -= version in steps
        version -= 1
    return version


def versions_ahead(policies: Sequence[Policy]) -> int:
    live = max((policy.version for policy in policies if policy.state is PolicyState.LIVE), default=BASE_VERSION)
    return sum(step > live for step in _steps(policies))


def age(policies: Sequence[Policy], sampled: int, version: int) -> int:
    """Return the number of trained versions between the version that sampled something and `version`."""
    return sum(sampled < step <= version for step in _steps(policies))


def _steps(policies: Sequence[Policy]) -> set[int]:
    """Return the versions that changed the weights and are part of later ones."""
    trained = (policy for policy in policies if policy.round_id is not None)
    return {policy.version for policy in trained if policy.state is not PolicyState.REJECTED}


# The backlog of judged groups: which groups the next round takes, and which are dropped first.
#
# Promises: the newest groups come first, for the judge and for a round, so that under overload only the surplus grows
# stale; stale groups are dropped before they are judged; a group that lost members is compared only if `min_group_size`
# remain. Does not train.
#
# A round that is smaller than `groups_per_round` takes a smaller step. AdamW moves the weights by about its learning
# rate whatever the size of the gradient, so a round of one trajectory would move them as far as one of 128. With sqrt(n
# / wanted) of the rate, AdamW adds the same noise per sample in small rounds as in large ones (Malladi et al. 2022, "On
# the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287).

_MIN_PAGE = 200  # groups read in one step
_STALE_ALARM = 4  # rounds' worth of groups


@dataclass(frozen=True, slots=True)
class RoundSize:
    """The number of groups in a full round, and of members in a full group."""

    groups_per_round: int
    num_generations: int

    def weight(self, groups: Sequence[Group]) -> float:
        """Return how many full groups these count as; a single counts as one member of a group."""
        return sum(1.0 if len(group.members) > 1 else 1.0 / self.num_generations for group in groups)

    def rate_scale(self, groups: Sequence[Group]) -> float:
        """Return the share of the learning rate for a round of these groups, at most 1."""
        return math.sqrt(min(1.0, self.weight(groups) / self.groups_per_round))


class Backlog:
    """The groups of one alias between grouping and training."""

    def __init__(self, store: Store, settings: TrainerSettings) -> None:
        self._store = store
        self._settings = settings
        self._size = RoundSize(settings.groups_per_round, settings.num_generations)
        self._alias = settings.model
        self._alarm = f"{DropReason.STALE}:{self._alias}"
        self._page = max(_MIN_PAGE, 2 * settings.groups_per_round * settings.num_generations)
        self._may_be_alarmed = True  # the alarm may be active, as an earlier trainer left it
        self._alarm_after = _STALE_ALARM * settings.groups_per_round
        self._looked_at: dict[GroupState, tuple[int, tuple[int, ...], frozenset[tuple[str, int]]]] = {}
        self._stale_in_a_row = len(store.groups.newly_dropped(self._alias, DropReason.STALE, self._alarm_after))

    def groups_to_judge(self, now: float, *, drop_stale: bool = True) -> list[Group]:
        """Return the groups that wait for the judge, the newest first.

        `drop_stale` must be False while a round runs: its groups may have become stale since.
        """
        found = self._store.groups.awaiting_verdict(self._alias, now, limit=_MIN_PAGE, newest_first=True)
        if found and drop_stale and self._drop_stale(found):
            found = self._store.groups.awaiting_verdict(self._alias, now, limit=_MIN_PAGE, newest_first=True)
        return self._comparable(found)

    def judged(self) -> list[Group]:
        """Return the newest trainable groups, oldest first. Raises an alarm if all recent groups were stale."""
        waiting = self._store.groups.awaiting_round(self._alias, limit=self._page, newest_first=True)
        if waiting and self._drop_stale(waiting):
            waiting = self._store.groups.awaiting_round(self._alias, limit=self._page, newest_first=True)
        found = self._comparable(waiting)[::-1]
        if found:
            self._stale_in_a_row = 0
            if self._may_be_alarmed:
                self._store.alarms.clear(self._alarm)
                self._may_be_alarmed = False
        elif self._stale_in_a_row >= self._alarm_after:
            self._may_be_alarmed = True
            self._store.alarms.raise_(
                self._alarm,
                f"the last {self._stale_in_a_row} groups were all sampled more than {self._settings.max_staleness} "
                "versions ago; raise max_staleness, or train less often",
            )
        return found

    def weight(self, groups: Sequence[Group]) -> float:
        """Return how many full groups these count as."""
        return self._size.weight(groups)

    def is_round_due(self, weight: float, waited: float, *, requested: bool = False) -> bool:
        """Whether groups of this weight, the first of them judged `waited` seconds ago, start a round.

        `requested`: a caller asked for the training of some of them, and waits. None starts while training is
        `max_staleness` versions ahead of the live one: what serves would be too old.
        """
        settings = self._settings
        late = waited >= settings.round_wait_seconds
        if not requested and weight < (settings.min_groups_per_round if late else settings.groups_per_round):
            return False
        return versions_ahead(self._store.policies.all(self._alias)) < max(1, settings.max_staleness)

    def newest(self, judged: Sequence[Group]) -> list[Group]:
        """Return the newest of `judged` that make one round."""
        weights = list(accumulate(self.weight([group]) for group in reversed(judged)))
        count = sum(weight <= self._settings.groups_per_round for weight in weights)
        return list(judged[-max(1, count) :])

    def _drop_stale(self, groups: Sequence[Group]) -> int:
        """Drop what was sampled too many versions before the newest one; return the number of groups.

        A version that serves is always judged, because its scores decide on releases, but it may be too old to train.
        Does nothing while neither the versions nor `groups`, those that wait, have changed since the last time.
        """
        policies = self._store.policies.all(self._alias)
        serving = tuple(policy.version for policy in policies if policy.state in SERVING)
        oldest = oldest_fresh(policies, self._settings.max_staleness)
        looked_at = oldest, serving, frozenset((group.id, len(group.members)) for group in groups)
        if self._looked_at.get(groups[0].state) == looked_at:
            return 0
        dropped = self._store.groups.drop_stale(self._alias, oldest, DropReason.STALE, serving)
        self._looked_at[groups[0].state] = looked_at
        self._stale_in_a_row += dropped
        return dropped

    def _comparable(self, groups: Sequence[Group]) -> list[Group]:
        """Drop the groups that lost too many members to compare the rest; return the others."""
        min_size = self._settings.min_group_size
        too_small = [group for group in groups if len(group.members) < min(min_size, group.initial_size)]
        for group in too_small:
            self._store.groups.drop(group.id, DropReason.GROUP_TOO_SMALL)
        return [group for group in groups if group not in too_small]


def is_drained(store: Store, alias: str, *, num_generations: int, groups_per_round: int) -> bool:
    """Return whether the trainer has processed all traffic of an agent so far.

    True if no trajectory is open and what waits is not enough for a group, a verdict, a round or a release. Further
    traffic may keep it false: callers need a time limit.
    """
    return (
        not store.trajectories.page(1, chosen=TrajectoryFilter(state=TrajectoryState.OPEN, alias=alias))
        and len(store.trajectories.sealed(alias, num_generations)) < num_generations
        and not store.groups.awaiting_verdict(alias, math.inf, limit=1)
        and len(store.groups.awaiting_round(alias)) < groups_per_round
        and not any(policy.state is PolicyState.CANDIDATE for policy in store.policies.all(alias))
        and not any(one.state is RoundState.STARTED for one in store.rounds.page(alias, limit=1))
    )
