"""The methods of AgentScope's tuner by its arguments, in the project of the working folder (ratchet.yaml)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ratchet.api.arguments import Tasks
from ratchet.api.evaluate import select_model_async
from ratchet.api.runs import TuningRun
from ratchet.api.tune import tune as train_weights
from ratchet.api.tune_prompt import tune_prompt as search_prompt
from ratchet.settings.load_settings import load
from ratchet.trainer.errors import NotCallable, SettingError, WorkflowError
from ratchet.trainer.tasks import TEST
from ratchet.trainer.user_code import name_of
from ratchet.tuner.rollouts.workflow import PARAMETERS
from ratchet.tuner.selection import Selection
from ratchet_agentscope.functions import adapted_workflow
from ratchet_agentscope.types import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeType,
    PromptTuneConfig,
    TunerModelConfig,
    WorkflowType,
)

log = logging.getLogger(__name__)

_HELD_OUT = 0.1  # share of a set without a split test


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
    _same_set(train_dataset, eval_dataset)
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


def tune(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType | None = None,
    train_dataset: DatasetConfig | None = None,
    eval_dataset: DatasetConfig | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: str | None = None,
) -> TuningRun:
    """Train the weights, and return the run once it has ended. Also in a notebook.

    judge_func        None: the workflow returns a reward
    train_dataset     its `total_steps` are the rounds; without it as many as `total_epochs` passes need
    eval_dataset      the split `test` of the same set; None: that split if there is one, else a tenth of the tasks
    model             None: base model and vLLM of ratchet.yaml
    auxiliary_models  names in `model_list` of ratchet.yaml; their configurations are not used
    algorithm         None: the settings of ratchet.yaml
    project_name      the project, which has a store of its own
    experiment_name   written to the log, with the run's id
    monitor_type      tensorboard, wandb or a plug-in

    If no project runs, vLLM, proxy and trainer are started for the run; a running one needs to have these settings, so
    `model` and `algorithm` are refused. Raises SettingError, and what `ratchet.tune` does.
    """
    if train_dataset is None:
        raise SettingError("train_dataset is None: give DatasetConfig(path=...)")
    if config_path is not None:
        raise SettingError("config_path names settings of Trinity: put the project's settings into ratchet.yaml")
    _same_set(train_dataset, eval_dataset)
    if unknown := sorted(set(auxiliary_models or ()) - set(load().listed_models)):
        raise SettingError(
            f"auxiliary_models names {unknown[0]!r}, which is not in model_list of ratchet.yaml: start that model "
            "yourself and list it there; workflow and judge get all models of the list"
        )
    plan, tasks = algorithm or AlgorithmConfig(), _tasks(train_dataset)
    settings = {**(model.settings if model else {}), **(algorithm.settings if algorithm else {})}
    if monitor_type is not None:
        settings["trainer"] = {**settings.get("trainer", {}), "report_to": [monitor_type]}
    run = train_weights(
        _workflow(workflow_func, None if model is None else model.sampling),
        {"kind": "workflow"} if judge_func is None else judge_func,
        tasks,
        rounds=train_dataset.total_steps or _rounds(tasks, train_dataset.total_epochs, plan.batch_size),
        tasks_per_round=plan.batch_size,
        eval_every=plan.eval_interval_steps,
        test_size=None if TEST in tasks.splits else _HELD_OUT,
        settings=settings,
        project=project_name,
    )
    log.info("event=tuning experiment=%s run=%s", experiment_name, run.id)
    return run.wait()


def _rounds(tasks: Tasks, epochs: int, tasks_per_round: int) -> int:
    return max(1, math.ceil(epochs * sum(1 for _ in tasks) / tasks_per_round))


def _same_set(train: DatasetConfig, evaluation: DatasetConfig | None) -> None:
    """Raise SettingError if the tasks of the comparison are not the split `test` of the training set."""
    if evaluation is not None and (evaluation.source, evaluation.split) != (train.source, TEST):
        raise SettingError(
            f"eval_dataset is the split {evaluation.split} of {evaluation.source}: put the tasks of the search and "
            f"of the comparison into one set, and give its split test ({train.source}, split='test')"
        )


def _tasks(dataset: DatasetConfig) -> Tasks:
    return Tasks(dataset.source, split=dataset.split)


def _workflow(function: Callable[..., Any], sampling: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    try:
        return adapted_workflow(function, PARAMETERS, always=True, sampling=sampling)
    except NotCallable as error:
        raise WorkflowError(f"workflow {name_of(function)}{error}") from error


def _name_of(candidate: Any) -> str:
    name = candidate if isinstance(candidate, str) else getattr(candidate, "model_name", None)
    name = getattr(candidate, "model", None) if name is None else name
    if not isinstance(name, str):
        raise SettingError(f"candidate_models holds {candidate!r:.100}: give AgentScope's models, or names of models")
    return name
