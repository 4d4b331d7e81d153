"""Evaluations in the background: a candidate is tried while trajectories go on being grouped, judged and collected.

One at a time, in a thread of its own. Promises: what was found is in the store before anybody decides on it, so that a
trainer that is killed goes on from there, or tries the candidate again, and no evaluation is decided on twice; an
evaluation that fails is an alarm and is tried again, it never counts as passed. Decides nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.errors import EngineError, EngineUnreachable, EvaluationStopped, TuningError
from ratchet.trainer.release.candidates import name_of
from ratchet.trainer.release.prompt_evaluation import Evaluated
from ratchet.trainer.settings.release_settings import ReleaseSettings

log = logging.getLogger(__name__)

KIND = "evaluation"  # of the observations that hold what was found
_AGAIN = 60.0  # seconds after a failure


class Evaluator(Protocol):
    """Something that compares a candidate with the live version; takes as long as it takes."""

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> Evaluated:
        """Return what was found; calls `check` now and then, which raises where it has to end.

        Raises EngineError, TuningError, EvaluationStopped, StoreError.
        """

    def close(self) -> None:
        """Let go of judges."""


# The store, the alias, the settings, the judge and the second judge; the tuner's evaluator, which this component
# cannot import.
MakeWorkflowEvaluator = Callable[[Store, str, ReleaseSettings, Judge, Judge | None], Evaluator]


class _Work:
    """One evaluation under way."""

    def __init__(self, subject: str, run: Callable[[Callable[[], None]], Evaluated]) -> None:
        self.subject = subject
        self.found: Evaluated | None = None
        self.error: BaseException | None = None
        self._run = run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="evaluation", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Have it end soon; nobody waits for it."""
        self._stop.set()

    def _work(self) -> None:
        try:
            self.found = self._run(self._check)
        except BaseException as error:  # noqa: BLE001  the daemon's own thread is told
            self.error = error

    def _check(self) -> None:
        if self._stop.is_set():
            raise EvaluationStopped("the trainer ends")


class Evaluations:
    """The evaluations of one alias."""

    def __init__(
        self, store: Store, alias: str, evaluator: Evaluator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._alias = alias
        self._evaluator = evaluator
        self._clock = clock
        self._work: _Work | None = None
        self._again_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether asking would only be told to wait."""
        return (self._work is not None and not self._work.is_over) or self._clock() < self._again_at

    def of(self, candidate: Policy, live: Policy) -> Evaluated | None:
        """Return what was found of a candidate beside the live version; None while it is being tried.

        Raises EngineUnreachable, and what the store raises: asking again is safe.
        """
        subject = f"{name_of(candidate)} against {name_of(live)}"
        if self.busy:
            return None
        work, self._work = self._work, None
        if work is not None and work.subject == subject and work.error is not None:
            self._failed(work.error, subject)
            return None
        known = self._store.observations.latest(self._alias, KIND).get(subject)
        if known is not None:
            self._store.alarms.clear(self._alarm)
            return msgspec.convert(known.content, Evaluated)
        self._work = _Work(subject, lambda check: self._evaluate(candidate, live, subject, check))
        log.info("event=evaluation_began policy=%s against=%s", name_of(candidate), name_of(live))
        return None

    def close(self) -> None:
        """End what is under way; it is tried again after the next start."""
        if self._work is not None:
            self._work.stop()
        self._evaluator.close()

    def _evaluate(self, candidate: Policy, live: Policy, subject: str, check: Callable[[], None]) -> Evaluated:
        found = self._evaluator.evaluate(candidate, live, check)
        self._store.observations.note(self._alias, KIND, subject, msgspec.to_builtins(found))
        told = found.first.told() if found.first is not None else "too little to compare on"
        log.info("event=evaluation_done policy=%s told=%r", name_of(candidate), told)
        return found

    def _failed(self, error: BaseException, subject: str) -> None:
        """Say that it failed and when it is tried again. Raises what is no failure of the evaluation."""
        if isinstance(error, EngineUnreachable) or not isinstance(error, EngineError | TuningError):
            raise error
        self._again_at = self._clock() + _AGAIN
        reason = f"evaluation of {subject} failed: {error}; it is tried again in {_AGAIN:g} s, nothing is promoted"
        self._store.alarms.raise_(self._alarm, reason)
        log.warning("event=evaluation_failed reason=%r", reason)

    @property
    def _alarm(self) -> str:
        return f"evaluation:{self._alias}"
