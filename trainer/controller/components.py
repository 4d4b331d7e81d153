"""Builds the components that judge from the settings of an agent.

Raises JudgeError, WorkflowError and TaskSetError if something that the settings name cannot be used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.advantages import AdvantageEstimator, ScoreHistory
from ratchet.trainer.errors import EngineUnreachable, JudgeError
from ratchet.trainer.judges.judge_runner import JudgeRunner, Rejudger, SecondJudge, zero_variance_groups
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.teacher import TeacherJudge
from ratchet.trainer.judges.make_judge import RunJudges, make_judge
from ratchet.trainer.judges.quality import NOISE
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.settings.judge_specs import TeacherSpec, asks_language_model
from ratchet.trainer.settings.objectives import find_estimator
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

ASSUMED_NOISE = 0.02  # of a language model's scores, until it is measured


@dataclass(frozen=True, slots=True)
class JudgingComponents:
    """The judge, and what turns its verdicts into judged groups. `second` judges a sample of the groups."""

    judge: Judge
    second: SecondJudge | None
    estimator: AdvantageEstimator
    runner: JudgeRunner
    rejudger: Rejudger


def make_judging_components(
    settings: TrainerSettings,
    store: Store,
    progress: Progress,
    on_judged: Callable[[], None],
    max_judge_threads: int | None,
    replicas: Sequence[VllmServer],
    metrics: TrainerMetrics,
) -> JudgingComponents:
    """Return the components that judge the groups of an alias. `on_judged` is called in the judges' threads."""
    find_estimator(settings.advantage_estimator)  # a plug-in that cannot be imported ends the start, not a round
    judge = _make_judge(settings, store, replicas)
    second = _make_second_judge(settings, store, judge)
    estimator = AdvantageEstimator(
        settings.advantage_estimator,
        settings.scale_advantages_by_family,
        settings.min_baseline_samples,
        settings.roles,
        ScoreHistory(store.groups.past_scores(settings.model, judge.version)),
        settings.turn_weight,
        settings.learner.objective.distillation,
        judge_noise(settings, store, judge.version),
    )
    runner = JudgeRunner(
        store,
        RunJudges(judge, store.tunings.get),
        attempts=settings.judge_attempts,
        retry_seconds=settings.judge_retry_seconds,
        estimator=estimator,
        progress=progress,
        second=second,
        zero_variance=zero_variance_groups(store, settings.model),
        min_group_size=settings.min_group_size,
        on_done=on_judged,
        max_threads=max_judge_threads,
        on_requests=metrics.judge_requests,
    )
    rejudger = Rejudger(
        store,
        settings.model,
        runner.submit_judge,
        estimator,
        attempts=settings.judge_attempts,
        retry_seconds=settings.judge_retry_seconds,
    )
    return JudgingComponents(judge, second, estimator, runner, rejudger)


def judge_noise(settings: TrainerSettings, store: Store, version: str) -> float:
    """Return the noise of this version of the judge: as set, as measured, or as assumed."""
    if settings.judge_noise is not None:
        return settings.judge_noise
    measured = store.observations.latest(settings.model, NOISE).get(version)
    if measured is not None:
        return float(measured.content["noise"])
    return ASSUMED_NOISE if asks_language_model(settings.judge) else 0.0


def _make_judge(settings: TrainerSettings, store: Store, replicas: Sequence[VllmServer]) -> Judge:
    """Return the judge; a teacher that cannot teach this policy is refused, one that does not answer yet is not."""
    if not isinstance(settings.judge, TeacherSpec):
        return make_judge(settings.judge, os.environ)

    def policy() -> VllmServer:
        for replica in replicas:
            return replica
        raise EngineUnreachable("no vLLM replica is known yet")

    teacher = TeacherJudge(settings.judge, os.environ, store.trajectories.context_calls, policy)
    try:
        teacher.check()
    except EngineUnreachable as away:  # it is checked before it scores
        log.warning("event=teacher_not_checked alias=%s reason=%r", settings.model, str(away))
    except JudgeError:
        teacher.close()
        raise
    return teacher


def _make_second_judge(settings: TrainerSettings, store: Store, first: Judge) -> SecondJudge | None:
    sentinel = settings.sentinel
    if not sentinel.second_judge:
        return None
    judge = make_judge(sentinel.second_judge, os.environ)
    return SecondJudge(judge, sentinel.second_judge_sample_rate, store, settings.model, first.version)
