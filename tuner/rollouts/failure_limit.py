"""When to stop a run: more rollouts failed than `tuner.max_failures` allows, or all of the first ones failed."""

from __future__ import annotations

from collections import Counter

from ratchet.trainer.errors import TooManyFailures
from ratchet.tuner.settings import TunerSettings

FIRST = 16  # rollouts of which one must succeed if `max_failures` is null
_SHOWN = 3  # different failures in a message


class Failures:
    """Counts the failures among `jobs` rollouts that run together."""

    def __init__(self, settings: TunerSettings, jobs: int, tuning_id: str, first_rollouts: FirstRollouts) -> None:
        self._settings = settings
        self._jobs = jobs
        self._tuning_id = tuning_id
        self._first_rollouts = first_rollouts
        self._failed: Counter[str] = Counter()
        self._finished = 0

    def record(self, failure: str | None) -> None:
        """Count a finished rollout; `failure` None: its workflow returned."""
        self._finished += 1
        self._first_rollouts.record(failure)
        if failure is not None:
            self._failed[failure] += 1

    def check(self) -> None:
        """Raise TooManyFailures if the run must stop."""
        limit = self._settings.max_failures
        if limit is None:
            self._first_rollouts.check(self._tuning_id)
        elif self._settings.exceeds_max_failures(failed := self._failed.total(), self._jobs):
            raise TooManyFailures(
                f"stopped: {failed} of {self._finished} rollouts failed (max_failures {limit}), "
                f"{_describe_failures(self._failed)}; finished "
                f"rollouts are kept in tuning {self._tuning_id}"
            )


class FirstRollouts:
    """Counts failures at the start of a runner, until one rollout succeeds."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        self._one_returned = False

    def record(self, failure: str | None) -> None:
        """Count a finished rollout."""
        self._one_returned = self._one_returned or failure is None
        if not self._one_returned:
            self._failed[str(failure)] += 1

    def check(self, tuning_id: str) -> None:
        """Raise TooManyFailures if all of the first rollouts failed."""
        if not self._one_returned and self._failed.total() >= FIRST:
            raise TooManyFailures(
                f"stopped: all of the first {self._failed.total()} rollouts failed, "
                f"{_describe_failures(self._failed)}; fix the "
                "workflow (`ratchet doctor --workflow` tests it), or set tuner.max_failures to continue anyway; "
                f"finished rollouts are kept in tuning {tuning_id}"
            )


def _describe_failures(failed: Counter[str]) -> str:
    """Return the commonest failures with their counts."""
    text = "; ".join(f"{times} of them with {failure}" for failure, times in failed.most_common(_SHOWN))
    others = len(failed) - _SHOWN
    return text + (f"; and {others} other failures" if others > 0 else "")
