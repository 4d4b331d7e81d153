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
from ratchet.trainer.judges.language_model import LanguageModel, key_of_model
from ratchet.tuner.prompts.prompt_tuning import check, config_of
from ratchet.tuner.prompts.prompt_tuning import run as run_tuning
from ratchet.tuner.reports import TuningResult
from ratchet.tuner.selection import known_models
from ratchet.tuner.settings import PromptSettings

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
        run_prompt_tuning(given.settings, seed_prompt, caller, model=model, resume=resume)

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


def run_prompt_tuning(
    settings: Settings,
    seed_prompt: str | None = None,
    caller: RunCaller = COMMAND,
    *,
    model: str | None = None,
    resume: str | None = None,
) -> tuple[str, TuningResult]:
    """Start or resume a run and complete it, with services for it if none run; return its id and its result.

    model   a name in `model_list`, whose prompt is searched in place of the agent's
    resume  a run of any agent of the project, with its request; only proxy, store and concurrency may change

    Raises TuningError, SettingsError, InvalidArgument, and what `run_services` does.
    """
    stored = None
    if resume is not None:
        stored = context.stored_run(settings, resume, "prompt")
        settings, model = _with_request(settings, stored), stored.config.get("listed_model")
    # Without retries: every rollout counts against the budget.
    settings = settings.changed(tuner={"max_retries": 0, "max_failures": None})
    tuner, name = settings.tuner, model or settings.model
    key = None if tuner.reflection is None else key_of_model(tuner.reflection, os.environ)

    def check_usable() -> None:
        context.check_usable(settings, caller)
        check(tuner, context.task_set_of(settings))

    with context.run_services(settings, caller, (name,), check_usable), context.opened(settings, caller) as opened:
        spec = check(tuner, context.task_set_of(settings))
        served = known_models(opened.proxy_url, opened.api_key)
        if model is not None and model not in served:
            raise InvalidArgument(f"{model} is in model_list, but the running proxy does not serve it: restart it")
        if stored is None:
            used = tuner.model_copy(update={"workflow": opened.workflow})
            config = config_of(used, settings.given_in("trainer").get("judge"), seed_prompt)
            config |= {"judge_name": opened.scorer.name, "listed_model": model}
            run = opened.store.tunings.begin("prompt", name, config)
        else:
            run, then = stored, stored.config
            same = {"workflow": (then["tuner"]["workflow"], opened.workflow)}
            context.check_same(run, same | {"judge": (then.get("judge_name"), opened.scorer.name)}, "run")
        with opened.lease.acquire(run.id, resume=resume is not None) as run:
            print_note(f"{run.id}: `{opened.lease.resumption(run)}` resumes it after an interruption")
            tasks = context.task_set_of(settings)
            return run.id, run_tuning(run, opened, tasks, LanguageModel(spec, key), print_note)


def check_resumption(name: str, given: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if options are given that the resumed run has already."""
    free = ("proxy", "concurrency", "store", "project")
    if fixed := [key for key, value in given.items() if value is not None and key not in free]:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in fixed)
        raise InvalidArgument(f"--resume uses the options of run {name}: leave out {names}")


def _with_request(settings: Settings, run: Tuning) -> Settings:
    """Return the settings overridden by the request of a run."""
    if settings.agents and not run.config.get("listed_model"):
        settings = settings.for_agent(run.alias)
    now = settings.tuner
    tuner = dict(run.config["tuner"]) | {"proxy_url": now.proxy_url, "concurrency": now.concurrency}
    alias = settings.model if run.config.get("listed_model") else run.alias
    return settings.changed(tuner=tuner, trainer={"judge": run.config["judge"]}, model=alias)
