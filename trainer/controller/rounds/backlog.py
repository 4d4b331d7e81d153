"""The backlog: judged groups that wait for a round. Which of them the next round takes, and which are dropped first.

Consumes ready and judged groups. Promises that the newest come first, for the judge as for a round, so that where more
arrives than can be trained the rest grows stale, not what is used; that what is too old is dropped before a judge is
asked about it; and that a group which lost members is compared only where `min_group_size` are left. Does not train.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ratchet.store.reasons import DropReason
from ratchet.store.records import Group
from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.round_size import RoundSize
from ratchet.trainer.controller.rounds.staleness import oldest_fresh
from ratchet.trainer.settings.trainer_settings import TrainerSettings

_LEAST_SEEN = 200  # groups looked at in one turn
_STALE_ALARM = 4  # rounds' worth of groups


class Backlog:
    """The groups of one alias between their forming and their round."""

    def __init__(self, store: Store, settings: TrainerSettings) -> None:
        self._store = store
        self._settings = settings
        self._size = RoundSize(settings.groups_per_round, settings.num_generations)
        self._alias = settings.model
        self._most = max(_LEAST_SEEN, 2 * settings.groups_per_round * settings.num_generations)
        self._alarm_at = _STALE_ALARM * settings.groups_per_round
        # groups in a row that were too old
        self._stale = len(store.groups.newly_dropped(self._alias, DropReason.STALE, self._alarm_at))

    def to_judge(self, now: float) -> list[Group]:
        """Return the groups that a judge should be asked about, the newest first."""
        self._drop_stale()
        return self._comparable(
            self._store.groups.awaiting_verdict(self._alias, now, limit=_LEAST_SEEN, newest_first=True)
        )

    def judged(self) -> list[Group]:
        """Return the newest judged groups that may be trained, oldest first; an alarm where all were too old."""
        self._drop_stale()
        found = self._comparable(self._store.groups.awaiting_round(self._alias, limit=self._most, newest_first=True))[
            ::-1
        ]
        if found:
            self._stale = 0
            self._store.alarms.clear(f"{DropReason.STALE}:{self._alias}")
        elif self._stale >= self._alarm_at:
            reason = (
                f"the last {self._stale} groups were all sampled more than {self._settings.max_staleness} versions ago"
            )
            self._store.alarms.raise_(
                f"{DropReason.STALE}:{self._alias}", f"{reason}; raise max_staleness, or train less often"
            )
        return found

    def weight(self, groups: Sequence[Group]) -> float:
        """Return how many groups these count for."""
        return self._size.weight(groups)

    def is_round_due(self, weight: float, waited: float) -> bool:
        """Whether groups that count for `weight`, the first of them judged `waited` seconds ago, start a round."""
        settings = self._settings
        late = waited >= settings.round_wait_seconds
        return weight >= (settings.min_groups_per_round if late else settings.groups_per_round)

    def newest(self, judged: Sequence[Group]) -> list[Group]:
        """Return the newest of `judged` that make a round."""
        weights = list(accumulate(self.weight([group]) for group in reversed(judged)))
        fitting = sum(weight <= self._settings.groups_per_round for weight in weights)
        return list(judged[-max(1, fitting) :])

    def _drop_stale(self) -> None:
        """Drop the groups, judged or not, that were sampled too many versions before the live one."""
        oldest = oldest_fresh(self._store.policies.all(self._alias), self._settings.max_staleness)
        self._stale += self._store.groups.drop_stale(self._alias, oldest, DropReason.STALE)

    def _comparable(self, groups: Sequence[Group]) -> list[Group]:
        """Drop the groups that have lost so many members that nothing is left to compare; return the others."""
        least = self._settings.min_group_size
        few = [group for group in groups if len(group.members) < min(least, group.initial_size)]
        for group in few:
            self._store.groups.drop(group.id, DropReason.GROUP_TOO_SMALL)
        return [group for group in groups if group not in few]
