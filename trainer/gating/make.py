"""Which evaluator the settings ask for: a workflow that plays held-out tasks, recorded prompts, or none."""

from __future__ import annotations

import os

from ratchet.store import Store
from ratchet.trainer.gating.evaluation import PromptEvaluator
from ratchet.trainer.gating.evaluations import Evaluations
from ratchet.trainer.gating.workflow_evaluation import WorkflowEvaluator
from ratchet.trainer.judges import Judge
from ratchet.trainer.judges.make import make_judge
from ratchet.trainer.publishing.engine import Replica
from ratchet.trainer.settings import TrainerSettings


def make_evaluations(settings: TrainerSettings, store: Store, replica: Replica) -> Evaluations | None:
    """Return what tries candidates; None where nothing is held out. Raises WorkflowError, TaskSetError, JudgeError."""
    gate = settings.release
    if gate.workflow is None and not gate.held_out:
        return None
    judge, second = make_judge(settings.judge, os.environ), make_second_judge(settings)
    if gate.workflow is not None:
        return Evaluations(store, settings.model, WorkflowEvaluator(store, settings.model, gate, judge, second))
    prompts = PromptEvaluator(
        store,
        replica,
        judge,
        second,
        alias=settings.model,
        prompts=gate.evaluation_prompts,
        samples=gate.evaluation_samples,
    )
    return Evaluations(store, settings.model, prompts)


def make_second_judge(settings: TrainerSettings) -> Judge | None:
    """Return the gate's second judge, else one of the sentinel's kind; None where neither is named."""
    asked = settings.release.second_judge or settings.sentinel.second_judge
    return make_judge(asked, os.environ) if asked else None
