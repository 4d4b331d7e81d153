"""Which evaluator the settings ask for: a workflow that plays held-out tasks, recorded prompts, or none."""

from __future__ import annotations

import os

from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import Replica
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.errors import SettingError
from ratchet.trainer.release.evaluation_runner import Evaluations, MakeWorkflowEvaluator
from ratchet.trainer.release.prompt_evaluation import PromptEvaluator
from ratchet.trainer.settings.trainer_settings import TrainerSettings


def make_evaluations(
    settings: TrainerSettings,
    store: Store,
    replica: Replica,
    make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
) -> Evaluations | None:
    """Return what evaluates candidates; None where nothing is held out.

    Raises WorkflowError, TaskSetError, JudgeError; SettingError where the settings name a workflow and the program
    that starts the trainer gave it no evaluator for workflows.
    """
    gate = settings.release
    if gate.workflow is None and not gate.held_out_share:
        return None
    judge, second = make_judge(settings.judge, os.environ), make_second_judge(settings)
    if gate.workflow is not None:
        if make_workflow_evaluator is None:
            raise SettingError("trainer.release.workflow needs the tuner: start the trainer with `ratchet trainer`")
        evaluator = make_workflow_evaluator(store, settings.model, gate, judge, second)
        return Evaluations(store, settings.model, evaluator)
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
