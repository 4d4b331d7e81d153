"""`ratchet.tune_prompt` and `ratchet tune prompt`: a better system prompt for an agent that stays as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from ratchet.api import arguments, context
from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, read_arguments
from ratchet.api.run_lease import COMMAND, RunCaller
from ratchet.api.runs import TuningRun, start, synchronous
from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings
from ratchet.settings.setting_errors import listed
from ratchet.store.operation_records import Tuning
from ratchet.trainer.judges.language_model import key_of_model
from ratchet.tuner.prompts.prompt_tuning import PromptRunContext, check, config_of
from ratchet.tuner.prompts.prompt_tuning import run as run_tuning
from ratchet.tuner.reports import TuningResult
from ratchet.tuner.selection import known_models
from ratchet.tuner.settings import PromptSettings, TunerSettings

SETTINGS: Final = {**arguments.SETTINGS, **{name: f"tuner.prompt.{name}" for name in PromptSettings.model_fields}}


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
    """Start the search for a better system prompt; the run's `best` is its text. Also in a notebook.

    In an event loop that runs already: `await (await tune_prompt_async(...))`.

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
    arguments = locals()
    given = read_arguments(arguments, SETTINGS, reflection_setting(reflection_url, reflection_model))
    if model is not None and model not in given.settings.listed_models:
        names = listed(given.settings.listed_models) or "no model"
        raise InvalidArgument(f"model={model!r} is not in model_list, which has {names}; agent= names an agent")
    fixed = ("model", "tasks", "seed_prompt", "method", "attempts", "seed")
    if resume is not None and (wrong := [name for name in fixed if arguments[name] is not None]):
        raise InvalidArgument(f"resume={resume!r} uses the options of that run: leave out {', '.join(wrong)}")

    def work(caller: RunCaller) -> None:
        if resume is not None:
            resume_run(given.settings, resume, caller)
        else:
            start_run(given.settings, seed_prompt, caller, model=model)

    return await start(given, "prompt", resume, work)


tune_prompt = synchronous(tune_prompt_async)


def reflection_setting(url: str | None, model: str | None) -> dict[str, Any]:
    """Return the setting of the reflection model; a model without a URL is one of `model_list`.

    Raises InvalidArgument for a URL alone.
    """
    if url is not None and model is None:
        raise InvalidArgument(
            "--reflection-url needs --reflection-model (in Python reflection_url=, reflection_model=); the latter "
            "alone names a model of model_list"
        )
    address = {} if url is None else {"base_url": url}
    return {} if model is None else {"tuner.reflection": {**address, "model": model}}


def start_run(
    settings: Settings, seed_prompt: str | None, caller: RunCaller = COMMAND, *, model: str | None = None
) -> tuple[str, TuningResult]:
    """Start a run and complete it, with services for it if none run; return its id and its result.

    `model`: a name in `model_list`, whose prompt is searched in place of the agent's.

    Raises TuningError, SettingsError, InvalidArgument, and what `run_services` does.
    """
    # Without retries: every rollout counts against the budget.
    settings = settings.changed(tuner={"max_retries": 0, "max_failures": None})
    tuner = settings.tuner
    name = model or settings.model
    _reflection_key(tuner)  # a missing one is an error before the run begins

    def check_usable() -> None:
        context.check_usable(settings, caller)
        check(tuner, context.task_set_of(settings))

    with context.run_services(settings, caller, (name,), check_usable), context.opened(settings, caller) as opened:
        check(tuner, context.task_set_of(settings))
        served = known_models(opened.proxy_url, opened.api_key)
        if model is not None and model not in served:
            raise InvalidArgument(f"{model} is in model_list, but the running proxy does not serve it: restart it")
        used = tuner.model_copy(update={"workflow": opened.workflow})
        config = config_of(used, settings.given_in("trainer").get("judge"), seed_prompt)
        config["judge_name"], config["listed_model"] = opened.scorer.name, model
        return _complete(opened, opened.store.tunings.begin("prompt", name, config).id)


def resume_run(settings: Settings, name: str, caller: RunCaller = COMMAND) -> tuple[str, TuningResult]:
    """Resume a run of any agent of the project with its request; only proxy, store and concurrency may change."""
    run = context.stored_run(settings, name, "prompt")
    if settings.agents and not run.config.get("listed_model"):
        settings = settings.for_agent(run.alias)
    settings = _with_request(settings, run)
    _reflection_key(settings.tuner)
    with (
        context.run_services(settings, caller, (run.alias,), lambda: context.check_usable(settings, caller)),
        context.opened(settings, caller) as opened,
    ):
        known_models(opened.proxy_url, opened.api_key)
        used = {"workflow": (run.config["tuner"]["workflow"], opened.workflow)}
        context.check_same(run, used | {"judge": (run.config.get("judge_name"), opened.scorer.name)}, "run")
        return _complete(opened, name, resume=True)


def check_resumption(name: str, given: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if options are given that the resumed run has already."""
    free = ("proxy", "concurrency", "store", "project")
    if fixed := [key for key, value in given.items() if value is not None and key not in free]:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in fixed)
        raise InvalidArgument(f"--resume uses the options of run {name}: leave out {names}")


def _reflection_key(settings: TunerSettings) -> str | None:
    """Return the API key of the reflection model. Raises JudgeError if its variable is not set."""
    return None if settings.reflection is None else key_of_model(settings.reflection, os.environ)


def _with_request(settings: Settings, run: Tuning) -> Settings:
    """Return the settings overridden by the request of a run."""
    now = settings.tuner
    tuner = dict(run.config["tuner"]) | {"proxy_url": now.proxy_url, "concurrency": now.concurrency}
    alias = settings.model if run.config.get("listed_model") else run.alias
    return settings.changed(tuner=tuner, trainer={"judge": run.config["judge"]}, model=alias)


def _complete(opened: context.TuningContext, name: str, *, resume: bool = False) -> tuple[str, TuningResult]:
    """Complete a run, or store why it ended."""
    with opened.lease.acquire(name, resume=resume) as run:
        print_note(f"{run.id}: `{opened.lease.resumption(run)}` resumes it after an interruption")
        run_context = PromptRunContext(
            store=opened.store, tasks=context.task_set_of(opened.settings), runner=opened.runner,
            scorer=opened.scorer, reflection_key=_reflection_key(opened.tuner), prices=opened.prices,
            progress=opened.progress, report=print_note,
        )  # fmt: skip
        return run.id, run_tuning(run, run_context)
