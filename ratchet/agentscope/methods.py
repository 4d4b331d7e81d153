"""The methods of AgentScope's tuner by its arguments. They run in the project of the working folder (ratchet.yaml)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ratchet.agentscope.types import DatasetConfig, JudgeType, PromptTuneConfig, WorkflowType
from ratchet.api.select_model import select_model_async
from ratchet.api.tasks import Tasks
from ratchet.api.tune_prompt import tune_prompt as search_prompt
from ratchet.trainer.errors import NotCallable, SettingError, WorkflowError
from ratchet.trainer.user_code.agentscope_functions import adapted_workflow
from ratchet.trainer.user_code.entry_points import name_of
from ratchet.tuner.rollouts.workflow import PARAMETERS
from ratchet.tuner.selection.choice import Selection

log = logging.getLogger(__name__)


async def select_model(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType,
    train_dataset: DatasetConfig,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
) -> tuple[Any, dict[str, float]]:
    """Return the candidate with the highest mean reward, and figures of its rollouts.

    candidate_models  AgentScope's models, or names: each stands for the model of its name in `model_list`, or for a
                      version such as `policy@4`; the calls go through the proxy
    max_threads       concurrent rollouts

    The run is stored, and `ratchet tune report` says how sure the choice is. Raises SettingError, and what
    `ratchet.select_model` does.
    """
    by_name = {_name_of(candidate): candidate for candidate in candidate_models}
    run = await select_model_async(
        _workflow(workflow_func),
        judge_func,
        _tasks(train_dataset),
        models=tuple(by_name),
        concurrency=max_threads,
        limit=train_dataset.total_steps,
    )
    await run
    found = msgspec.convert(run.result.details, Selection)
    if found.chosen is None:
        log.warning("event=no_model_shown_better run=%s reason=%r", run.id, found.reason)
    score = found.ranking.scores[0]
    figures = next(one for one in found.figures if one.candidate == score.candidate)
    metrics = {
        "reward_avg": score.mean,
        "reward_low": score.low,
        "reward_high": score.high,
        "failed": score.failed,
        "avg_time_seconds": figures.seconds_p50,
        "avg_token_consumption": figures.tokens_per_rollout,
    }
    return by_name[score.candidate], {name: float(value) for name, value in metrics.items() if value is not None}


def tune_prompt(
    *,
    workflow: WorkflowType,
    init_system_prompt: str,
    judge_func: JudgeType,
    train_dataset: DatasetConfig,
    eval_dataset: DatasetConfig | None = None,
    config: PromptTuneConfig | None = None,
) -> tuple[str, dict[str, float]]:
    """Return the best prompt, and what it gained on held-out tasks. Also in a notebook.

    workflow      takes `model` (or `base_url`) as well, so that its calls pass the proxy
    eval_dataset  the split `test` of the same set; None: that split if there is one, else a part of the tasks

    If nothing is shown to be better, the prompt is `init_system_prompt`. The run is stored; `ratchet tune report` has
    the figures. Raises SettingError, and what `ratchet.tune_prompt` does.
    """
    chosen = config or PromptTuneConfig()
    if eval_dataset is not None and (eval_dataset.source, eval_dataset.split) != (train_dataset.source, "test"):
        raise SettingError(
            f"eval_dataset is the split {eval_dataset.split} of {eval_dataset.source}: put the tasks of the search and "
            f"of the comparison into one set, and give its split test ({train_dataset.source}, split='test')"
        )
    run = search_prompt(
        _workflow(workflow),
        judge_func,
        _tasks(train_dataset).source,
        seed_prompt=init_system_prompt,
        reflection_url=chosen.base_url,
        reflection_model=chosen.lm_model_name,
        max_rollouts=chosen.max_rollouts,
        concurrency=chosen.eval_num_threads,
    ).wait()
    gain = run.result.gain
    metrics: dict[str, float] = {}
    if gain is not None and gain.difference is not None:
        metrics = {"difference": gain.difference, "low": gain.low, "high": gain.high}
        if gain.against_mean:
            metrics["valset_improvement"] = 100 * gain.difference / gain.against_mean
    return run.best or init_system_prompt, metrics


def _tasks(dataset: DatasetConfig) -> Tasks:
    return Tasks(dataset.source, split=dataset.split)


def _workflow(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return adapted_workflow(function, PARAMETERS, always=True)
    except NotCallable as error:
        raise WorkflowError(f"workflow {name_of(function)}{error}") from error


def _name_of(candidate: Any) -> str:
    name = candidate if isinstance(candidate, str) else getattr(candidate, "model_name", None)
    name = getattr(candidate, "model", None) if name is None else name
    if not isinstance(name, str):
        raise SettingError(f"candidate_models holds {candidate!r:.100}: give AgentScope's models, or names of models")
    return name
