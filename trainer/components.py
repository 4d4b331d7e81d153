"""Builds the controller's components from its settings: those that judge, and those that release.

Raises JudgeError, WorkflowError and TaskSetError if something that the settings name cannot be used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.controller.advantages.baseline import ScoreHistory
from ratchet.trainer.controller.advantages.estimator import AdvantageEstimator
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.controller.judging.judge_runner import JudgeRunner, zero_variance_groups
from ratchet.trainer.controller.judging.judged_groups import JudgedGroupCache
from ratchet.trainer.controller.judging.rejudging import Rejudger
from ratchet.trainer.controller.judging.second_judge import SecondJudge
from ratchet.trainer.controller.sentinel.sentinel import Sentinel
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.release.canary import CanaryController
from ratchet.trainer.release.evaluation_runner import (
    EvaluationRunner,
    MakeWorkflowEvaluator,
    make_evaluation_runner,
    make_second_judge,
)
from ratchet.trainer.release.publisher import Publisher
from ratchet.trainer.settings.trainer_settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class JudgingComponents:
    """The judge, and what turns its verdicts into judged groups. `second` judges a sample of the groups."""

    judge: Judge
    second: SecondJudge | None
    judged: JudgedGroupCache
    runner: JudgeRunner
    rejudger: Rejudger


@dataclass(frozen=True, slots=True)
class ReleaseComponents:
    """What makes a version live, and what may block it."""

    sentinel: Sentinel
    evaluations: EvaluationRunner | None
    publisher: Publisher
    canary: CanaryController


def make_judging_components(settings: TrainerSettings, store: Store, progress: Progress) -> JudgingComponents:
    """Return the components that judge the groups of an alias."""
    judge = make_judge(settings.judge, os.environ)
    second = _make_second_judge(settings, store, judge)
    estimator = AdvantageEstimator(
        settings.advantage_estimator,
        settings.scale_advantages_by_family,
        settings.min_baseline_samples,
        settings.roles,
        ScoreHistory(store.groups.past_scores(settings.model, judge.version)),
        settings.turn_weight,
    )
    judged = JudgedGroupCache(store, estimator)
    runner = JudgeRunner(
        store,
        judge,
        attempts=settings.judge_attempts,
        retry_seconds=settings.judge_retry_seconds,
        alarm_after=settings.no_signal_alarm,
        judged=judged,
        progress=progress,
        second=second,
        zero_variance=zero_variance_groups(store, settings.model),
        min_group_size=settings.min_group_size,
    )
    rejudger = Rejudger(
        store,
        settings.model,
        runner.submit_judge,
        estimator,
        attempts=settings.judge_attempts,
        retry_seconds=settings.judge_retry_seconds,
    )
    return JudgingComponents(judge, second, judged, runner, rejudger)


def make_release_components(
    settings: TrainerSettings,
    store: Store,
    replicas: Sequence[VllmServer],
    judging: JudgingComponents,
    metrics: TrainerMetrics,
    make_workflow_evaluator: MakeWorkflowEvaluator | None,
) -> ReleaseComponents:
    """Return the components that release the versions of an alias."""
    release, alias = settings.release, settings.model
    evaluations = make_evaluation_runner(settings, store, replicas[0], make_workflow_evaluator)
    sentinel = Sentinel(settings.sentinel, store, alias, metrics, judging.second)
    publisher = Publisher(
        store,
        replicas,
        alias=alias,
        tolerance=settings.proof_tolerance,
        keep_loaded_adapters=settings.keep_loaded_adapters,
        canary_share=release.canary_share if release.canary else None,
        evaluations=evaluations,
        max_gain=release.max_gain,
        blocking_findings=sentinel.blocking_findings,
    )
    second = make_second_judge(settings)
    canary = CanaryController(store, alias, release, judging.judge.version, second, sentinel.blocking_findings, metrics)
    return ReleaseComponents(sentinel, evaluations, publisher, canary)


def _make_second_judge(settings: TrainerSettings, store: Store, first: Judge) -> SecondJudge | None:
    sentinel = settings.sentinel
    if not sentinel.second_judge:
        return None
    judge = make_judge(sentinel.second_judge, os.environ)
    return SecondJudge(judge, sentinel.second_judge_sample_rate, store, settings.model, first.version)
