"""When a run gives up: more rollouts failed than `tuner.max_failures` allows, or all of its first ones did.

A run whose every rollout fails measures nothing and costs everything: it stops at once, with what the agent raised.
"""

from __future__ import annotations

from collections import Counter

from ratchet.trainer.errors import TooManyFailures
from ratchet.tuner.settings.tuner_settings import TunerSettings

FIRST = 16  # rollouts of which one must end well, where `max_failures` says nothing
_SHOWN = 3  # different failures


class Failures:
    """The failures of one part of a run: `jobs` rollouts that are made together."""

    def __init__(self, settings: TunerSettings, jobs: int, tuning_id: str, beginning: FirstRollouts) -> None:
        self._settings = settings
        self._jobs = jobs
        self._tuning_id = tuning_id
        self._beginning = beginning
        self._failed: Counter[str] = Counter()
        self._over = 0

    def take(self, failure: str | None) -> None:
        """Count a rollout that is over; `failure` None: its workflow returned."""
        self._over += 1
        self._beginning.take(failure)
        if failure is not None:
            self._failed[failure] += 1

    def check(self) -> None:
        """Raise TooManyFailures where nothing more is to be made."""
        most = self._settings.max_failures
        if most is None:
            self._beginning.check(self._tuning_id)
        elif self._settings.exceeds_max_failures(failed := self._failed.total(), self._jobs):
            raise TooManyFailures(
                f"stopped: {failed} of {self._over} rollouts failed (max_failures {most}), {_told(self._failed)}; what "
                f"ran is kept in tuning {self._tuning_id}"
            )


class FirstRollouts:
    """The first rollouts of a runner, until one of them returns."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        self._is_over = False

    def take(self, failure: str | None) -> None:
        """Count a rollout that is over."""
        self._is_over = self._is_over or failure is None
        if not self._is_over:
            self._failed[str(failure)] += 1

    def check(self, tuning_id: str) -> None:
        """Raise TooManyFailures where the first ones all failed."""
        if not self._is_over and self._failed.total() >= FIRST:
            raise TooManyFailures(
                f"stopped: all of the first {self._failed.total()} rollouts failed, {_told(self._failed)}; mend the "
                "workflow (`ratchet doctor --workflow` tries it), or set tuner.max_failures to go on all the same; "
                f"what ran is kept in tuning {tuning_id}"
            )


def _told(failed: Counter[str]) -> str:
    """Return the commonest failures."""
    told = "; ".join(f"{times} of them with {failure}" for failure, times in failed.most_common(_SHOWN))
    others = len(failed) - _SHOWN
    return told + (f"; and {others} other failures" if others > 0 else "")
