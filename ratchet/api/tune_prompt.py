"""`ratchet.tune_prompt`: a better system prompt for an agent that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, read_arguments
from ratchet.api.event_loop import run_to_end
from ratchet.api.runs import TuningRun, start
from ratchet.errors import InvalidArgument
from ratchet.settings.setting_errors import listed
from ratchet.tuning import tune_prompt as prompts
from ratchet.tuning.caller import RunCaller

_OWN = (
    "method", "max_rollouts", "max_total_tokens", "mode", "train_tasks", "validation_tasks", "held_out_tasks",
    "reflection_url", "reflection_model",
)  # fmt: skip


def tune_prompt(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    model: str | None = None,
    reflection_url: str | None = None,
    reflection_model: str | None = None,
    seed_prompt: str | None = None,
    method: str | None = None,
    max_rollouts: int | None = None,
    max_total_tokens: int | None = None,
    mode: Literal["auto", "replace", "append"] | None = None,
    train_tasks: int | None = None,
    validation_tasks: int | None = None,
    held_out_tasks: int | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> TuningRun:
    """Start the search for a better system prompt; the run's `best` is its text. Also in a notebook.

    model             a name in the project's `model_list`, whose prompt is searched in place of the agent's; it needs
                      no vLLM and no base model
    reflection_url    base URL of the language model that proposes prompts; None: `tuner.reflection` of the settings
    reflection_model  its name; without a URL, one of `model_list`
    seed_prompt       the text to start from; None: the agent's own prompt
    method            the optimizer: gepa, mipro or a plug-in
    max_rollouts      limit of all rollouts
    max_total_tokens  limit of tokens, of agent and reflection model together
    mode              how the prompt is applied
    train_tasks, validation_tasks, held_out_tasks  maximum numbers of tasks, all different
    resume            the id of a run that ended early; with the same workflow and judge, and without other options

    The other arguments are those of `evaluate`; the task set has a split `test`, or `test_size` is set. `promote`
    creates a version of the agent with the prompt. Returns once the run has its id. Raises what `evaluate` does.
    """
    return run_to_end(tune_prompt_async(**locals()))


async def tune_prompt_async(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    model: str | None = None,
    reflection_url: str | None = None,
    reflection_model: str | None = None,
    seed_prompt: str | None = None,
    method: str | None = None,
    max_rollouts: int | None = None,
    max_total_tokens: int | None = None,
    mode: Literal["auto", "replace", "append"] | None = None,
    train_tasks: int | None = None,
    validation_tasks: int | None = None,
    held_out_tasks: int | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> TuningRun:
    """Do what `tune_prompt` does, beside the running event loop: `await (await tune_prompt_async(...))`."""
    given = read_arguments(locals(), _OWN, prompts.setting_names)
    if model is not None and model not in given.settings.listed_models:
        names = listed(given.settings.listed_models) or "no model"
        raise InvalidArgument(f"model={model!r} is not in model_list, which has {names}; agent= names an agent")
    fixed = {
        "model": model,
        "tasks": tasks,
        "seed_prompt": seed_prompt,
        "method": method,
        "attempts": attempts,
        "seed": seed,
    }
    if resume is not None and (wrong := [name for name, value in fixed.items() if value is not None]):
        raise InvalidArgument(f"resume={resume!r} uses the options of that run: leave out {', '.join(wrong)}")

    def work(caller: RunCaller) -> None:
        if resume is not None:
            prompts.resume_run(given.settings, resume, caller)
        else:
            prompts.start_run(given.settings, seed_prompt, caller, model=model)

    return await start(given, "prompt", resume, work)
