"""Evaluations in the background: a candidate is evaluated while the trainer collects, groups and judges.

One evaluation at a time, in its own thread. Promises: a result is in the store before anybody decides on it, so a
trainer that is killed continues from there or evaluates again, and no result is used twice; an evaluation that fails
raises an alarm and is repeated, and never counts as passed. Decides nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.errors import EngineError, EngineUnreachable, EvaluationStopped, SettingError, TuningError
from ratchet.trainer.release.candidates import version_name
from ratchet.trainer.release.evaluation import EvaluationResult
from ratchet.trainer.release.invariants import InvariantsResult
from ratchet.trainer.release.invariants_check import KIND as INVARIANTS
from ratchet.trainer.release.invariants_check import InvariantsCheck
from ratchet.trainer.release.prompt_evaluation import PromptEvaluator
from ratchet.trainer.settings.release_settings import ReleaseSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

KIND = "evaluation"  # of the observations that hold the results
_RETRY_SECONDS = 60.0  # after a failure


class Result(Protocol):
    """What an evaluation found: a dataclass that msgspec can write and read again."""

    def describe(self) -> str:
        """Return it as one clause, "" if nothing is known."""


ResultT = TypeVar("ResultT", bound=Result)
ResultT_co = TypeVar("ResultT_co", bound=Result, covariant=True)


class Evaluator(Protocol[ResultT_co]):
    """Compares a candidate with the live version. Blocks."""

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> ResultT_co:
        """Return the result; call `check` regularly, which raises if the evaluation has to stop.

        Raises EngineError, TuningError, EvaluationStopped, StoreError.
        """

    def close(self) -> None:
        """Close what it uses."""


# Arguments: the store, the alias, the settings, the judge and the second judge. The tuner's evaluator is passed in
# because the trainer cannot import the tuner.
MakeWorkflowEvaluator = Callable[[Store, str, ReleaseSettings, Judge, Judge | None], Evaluator[EvaluationResult]]


def make_evaluation_runner(
    settings: TrainerSettings,
    store: Store,
    replicas: Sequence[VllmServer],
    make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
) -> EvaluationRunner[EvaluationResult] | None:
    """Return the runner that the settings name: a workflow, recorded prompts, or None if nothing is held out.

    Raises WorkflowError, TaskSetError, JudgeError; SettingError if the settings name a workflow and the program that
    starts the trainer passes no evaluator for workflows.
    """
    release = settings.release
    if release.workflow is None and not release.held_out_share:
        return None
    judge, second = make_judge(settings.judge, os.environ), make_second_judge(settings)
    if release.workflow is not None:
        if make_workflow_evaluator is None:
            raise SettingError("trainer.release.workflow needs the tuner: start the trainer with `ratchet trainer`")
        evaluator = make_workflow_evaluator(store, settings.model, release, judge, second)
        return EvaluationRunner(store, settings.model, evaluator, EvaluationResult, KIND)
    prompts = PromptEvaluator(
        store,
        replicas,
        judge,
        second,
        alias=settings.model,
        prompts=release.evaluation_prompts,
        samples=release.evaluation_samples,
    )
    return EvaluationRunner(store, settings.model, prompts, EvaluationResult, KIND)


def make_invariants_runner(
    settings: TrainerSettings, store: Store, replicas: Sequence[VllmServer]
) -> EvaluationRunner[InvariantsResult] | None:
    """Return the runner of the invariants check; None if there are no users to protect, or no prompts to ask."""
    release = settings.release
    if release.policy == "immediate" or not release.invariant_prompts:
        return None
    check = InvariantsCheck(
        store,
        replicas,
        alias=settings.model,
        prompts=release.invariant_prompts,
        max_tokens=release.invariant_max_tokens,
    )
    return EvaluationRunner(store, settings.model, check, InvariantsResult, INVARIANTS)


def make_second_judge(settings: TrainerSettings) -> Judge | None:
    """Return the second judge of releases, else of the sentinel; None if the settings name neither."""
    spec = settings.release.second_judge or settings.sentinel.second_judge
    return make_judge(spec, os.environ) if spec else None


class EvaluationRunner(Generic[ResultT]):
    """Runs the evaluations of one alias and kind, which names their results in the store and their alarm."""

    def __init__(
        self,
        store: Store,
        alias: str,
        evaluator: Evaluator[ResultT],
        result: type[ResultT],
        kind: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._alias = alias
        self._evaluator = evaluator
        self._result = result
        self._kind = kind
        self._clock = clock
        self._job: _EvaluationJob | None = None
        self._retry_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether `result_for` would return None: an evaluation runs, or waits to be repeated."""
        return (self._job is not None and not self._job.is_over) or self._clock() < self._retry_at

    def result_for(self, candidate: Policy, live: Policy) -> ResultT | None:
        """Return the result of a candidate beside the live version; None while it is evaluated.

        Raises EngineUnreachable, and what the store raises; calling again is safe.
        """
        subject = f"{version_name(candidate)} against {version_name(live)}"
        if self.is_running:
            return None
        job, self._job = self._job, None
        if job is not None and job.subject == subject and job.error is not None:
            self._handle_failure(job.error, subject)
            return None
        known = self._store.observations.latest(self._alias, self._kind).get(subject)
        if known is not None:
            self._store.alarms.clear(self._alarm)
            return msgspec.convert(known.content, self._result)
        self._job = _EvaluationJob(subject, lambda check: self._evaluate(candidate, live, subject, check))
        log.info("event=%s_started policy=%s against=%s", self._kind, version_name(candidate), version_name(live))
        return None

    def close(self) -> None:
        """Stop the running evaluation; it is repeated after the next start."""
        if self._job is not None:
            self._job.stop()
        self._evaluator.close()

    def _evaluate(self, candidate: Policy, live: Policy, subject: str, check: Callable[[], None]) -> None:
        result = self._evaluator.evaluate(candidate, live, check)
        self._store.observations.add(self._alias, self._kind, subject, msgspec.to_builtins(result))
        described = result.describe() or "too little to compare"
        log.info("event=%s_done policy=%s result=%r", self._kind, version_name(candidate), described)

    def _handle_failure(self, error: BaseException, subject: str) -> None:
        """Raise an alarm and schedule a retry. Raises `error` if it is not a failure of the evaluation."""
        if isinstance(error, EngineUnreachable) or not isinstance(error, EngineError | TuningError):
            raise error
        self._retry_at = self._clock() + _RETRY_SECONDS
        reason = f"{self._kind} of {subject} failed: {error}; next try in {_RETRY_SECONDS:g} s, nothing is promoted"
        self._store.alarms.raise_(self._alarm, reason)
        log.warning("event=%s_failed reason=%r", self._kind, reason)

    @property
    def _alarm(self) -> str:
        return f"{self._kind}:{self._alias}"


@dataclass(frozen=True, slots=True)
class PreReleaseChecks:
    """The checks of a proven candidate before it serves users, in order; None: not by the settings."""

    invariants: EvaluationRunner[InvariantsResult] | None = None
    replay: EvaluationRunner[EvaluationResult] | None = None

    @property
    def is_running(self) -> bool:
        """Whether one runs, or waits to be repeated."""
        return any(one.is_running for one in (self.invariants, self.replay) if one is not None)

    def close(self) -> None:
        """Stop what runs; it is repeated after the next start."""
        for one in (self.invariants, self.replay):
            if one is not None:
                one.close()


class _EvaluationJob:
    """One running evaluation."""

    def __init__(self, subject: str, evaluate: Callable[[Callable[[], None]], None]) -> None:
        self.subject = subject
        self.error: BaseException | None = None
        self._evaluate = evaluate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Request the end; does not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._evaluate(self._check)
        except BaseException as error:  # noqa: BLE001  raised again in the daemon's thread
            self.error = error

    def _check(self) -> None:
        if self._stop.is_set():
            raise EvaluationStopped("the trainer is stopping")
