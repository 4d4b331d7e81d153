"""Start, resume and report `ratchet tune prompt`, and create a candidate version from its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings
from ratchet.tuning import context as tuning
from ratchet.tuning.caller import COMMAND, RunCaller
from ratchet.tuning.run_services import run_services

if TYPE_CHECKING:
    from ratchet.store.operation_records import Tuning
    from ratchet.store.store import Store
    from ratchet.tuner.reports.tuning_result import TuningResult
    from ratchet.tuner.settings import TunerSettings

_PROMPT = ("method", "max_rollouts", "max_total_tokens", "mode", "train_tasks", "validation_tasks", "held_out_tasks")


@dataclass(frozen=True)
class PromptOutcome:
    """Result of a run. `content`: its record as JSON values."""

    run: str
    content: dict[str, Any]

    @property
    def better(self) -> bool:
        """Whether the prompt is shown to be better."""
        return bool(self._details["verdict"] == "better")

    @property
    def prompt(self) -> str:
        """The best prompt; the seed prompt if none was better."""
        return str(self._details["prompt"])

    @property
    def _details(self) -> Mapping[str, Any]:
        details: Mapping[str, Any] = self.content["details"]
        return details

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        details, gain, budget = self._details, self.content.get("gain"), self._details["budget"]
        lines = [f"{self.run}: {details['verdict']}: {details['why']}"]
        if gain is not None and gain["difference"] is not None:
            lines.append(
                f"held-out: {gain['against_mean']:.3f} -> {gain['mean']:.3f}, {gain['difference']:+.3f} "
                f"({gain['low']:+.3f} to {gain['high']:+.3f}, 95%) on {gain['tasks']} tasks, p {gain['p_value']:.3g}"
            )
        tokens = f"{budget['agent_tokens']:,} tokens of the agent and {budget['reflection_tokens']:,} of reflections"
        lines += [
            f"cost: {budget['rollouts_begun']} of {budget['rollouts']} rollouts, {tokens}",
            f"search: {len(details['validation'])} prompts; {details['search_ended_by']}",
            f"prompt ({details['mode']}, {details['prompt_id'] or 'unchanged'}):",
        ]
        return [*lines, *(f"  {line}" for line in self.prompt.splitlines())]


def setting_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options or arguments by the names of their settings. Raises InvalidArgument."""
    own = {key: value for key, value in given.items() if not key.startswith("reflection_")}
    named = {f"tuner.prompt.{key}" if key in _PROMPT else key: value for key, value in own.items()}
    return tuning.setting_names(named) | reflection_setting(given["reflection_url"], given["reflection_model"])


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
) -> PromptOutcome:
    """Start a run and complete it, with services for it if none run.

    `model`: a name in `model_list`, whose prompt is searched in place of the agent's.

    Raises TuningError, SettingsError, InvalidArgument, and what `run_services` does.
    """
    from ratchet.tuner.prompts.prompt_run import check, config_of
    from ratchet.tuner.selection.model_selection import known_models

    settings = _without_retries(settings)
    tuner_settings = settings.tuner_settings()
    name = model or settings.model
    _reflection_key(tuner_settings)  # a missing one is an error before the run begins

    def check_usable() -> None:
        tuning.check_usable(settings, caller)
        check(tuner_settings, tuning.task_set_of(settings, tuning.source_of(settings)))

    with run_services(settings, caller, (name,), check_usable), tuning.opened(settings, caller) as tuner_context:
        check(tuner_settings, tuner_context.task_set(tuner_context.source()))
        served = known_models(tuner_context.proxy_url, tuner_context.api_key)
        if model is not None and model not in served:
            raise InvalidArgument(f"{model} is in model_list, but the running proxy does not serve it: restart it")
        used = tuner_settings.model_copy(update={"workflow": tuner_context.workflow})
        config = config_of(used, settings.trainer.get("judge"), seed_prompt)
        config["judge_name"], config["listed_model"] = tuner_context.scorer.name, model
        return _complete(tuner_context, tuner_context.store.tunings.begin("prompt", name, config).id)


def resume_run(settings: Settings, name: str, caller: RunCaller = COMMAND) -> PromptOutcome:
    """Resume a run of any agent of the project with its request; only proxy, store and concurrency may change."""
    from ratchet.tuner.selection.model_selection import known_models

    run = tuning.stored_run(settings, name, "prompt")
    if settings.agents and not run.config.get("listed_model"):
        settings = settings.for_agent(run.alias)
    settings = _with_request(settings, run)
    _reflection_key(settings.tuner_settings())
    with (
        run_services(settings, caller, (run.alias,), lambda: tuning.check_usable(settings, caller)),
        tuning.opened(settings, caller) as tuner_context,
    ):
        known_models(tuner_context.proxy_url, tuner_context.api_key)
        _check_same(run, tuner_context)
        return _complete(tuner_context, name, resume=True)


def _check_same(run: Tuning, tuner_context: tuning.TuningContext) -> None:
    """Raise InvalidArgument if the run used another workflow or judge."""
    for what, then, now in (
        ("workflow", run.config["tuner"]["workflow"], tuner_context.workflow),
        ("judge", run.config.get("judge_name"), tuner_context.scorer.name),
    ):
        if then not in (None, now):
            raise InvalidArgument(
                f"--resume {run.id}: the run used the {what} {then}, now it is {now}; use the same {what} for the "
                "whole run"
            )


def check_resumption(name: str, given: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if options are given that the resumed run has already."""
    free = ("proxy", "concurrency", "store", "project")
    fixed = [key for key, value in given.items() if value is not None and key not in free]
    if fixed:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in fixed)
        raise InvalidArgument(f"--resume uses the options of run {name}: leave out {names}")


def create_candidate(store: Store, name: str, *, force: bool = False) -> str:
    """Create a candidate version with a run's prompt; return `alias@version`. Raises InvalidArgument, StoreError."""
    run = store.tunings.get(name)
    details = (run.result or {}).get("details", {})
    if run.kind != "prompt" or run.state != "done":
        raise InvalidArgument(f"run {name} ({run.kind}, {run.state}) has no prompt to promote")
    if details["prompt_id"] is None:
        raise InvalidArgument(f"run {name} found no better prompt than its seed prompt")
    if (model := run.config.get("listed_model")) is not None:
        raise InvalidArgument(
            f"run {name} tuned the prompt of {model}, a model of model_list, which has no versions: give the prompt to "
            "your agent as its system prompt (--out FILE writes it; in Python run.best)"
        )
    if details["verdict"] != "better" and not force:
        raise InvalidArgument(
            f"run {name}: {details['verdict']}, {details['why']}; promote it anyway with --force (in Python force=True)"
        )
    evidence = {"tuning": name, "verdict": details["verdict"], "gain": (run.result or {}).get("gain")}
    policy = store.policies.register_prompt_version(run.alias, details["prompt_id"], evidence)
    return f"{policy.alias}@{policy.version}"


def _reflection_key(settings: TunerSettings) -> str | None:
    """Return the API key of the reflection model. Raises JudgeError if its variable is not set."""
    from ratchet.trainer.controller.judges.language_model import key_of_model

    return None if settings.reflection is None else key_of_model(settings.reflection, os.environ)


def _without_retries(settings: Settings) -> Settings:
    """Disable retries: every rollout counts against the budget."""
    return settings.model_copy(update={"tuner": settings.tuner | {"max_retries": 0, "max_failures": None}})


def _with_request(settings: Settings, run: Tuning) -> Settings:
    """Return the settings overridden by the request of a run."""
    now = settings.tuner_settings()
    tuner = dict(run.config["tuner"]) | {"proxy_url": now.proxy_url, "concurrency": now.concurrency}
    judge = {} if run.config["judge"] is None else {"judge": run.config["judge"]}
    trainer = {key: value for key, value in settings.trainer.items() if key != "judge"} | judge
    alias = settings.model if run.config.get("listed_model") else run.alias
    return settings.model_copy(update={"tuner": tuner, "trainer": trainer, "model": alias})


def _complete(tuner_context: tuning.TuningContext, name: str, *, resume: bool = False) -> PromptOutcome:
    """Complete a run, or store why it ended."""
    import msgspec

    from ratchet.tuner.prompts.prompt_run import PromptRunContext
    from ratchet.tuner.prompts.prompt_run import run as run_

    with tuner_context.lease.acquire(name, resume=resume) as run:
        print_note(f"{run.id}: `{tuner_context.lease.resumption(run)}` resumes it after an interruption")
        run_context = PromptRunContext(
            store=tuner_context.store,
            tasks=tuner_context.task_set(tuner_context.source()),
            runner=tuner_context.runner,
            scorer=tuner_context.scorer,
            reflection_key=_reflection_key(tuner_context.tuner),
            prices=tuner_context.prices,
            progress=tuner_context.progress,
            report=print_note,
        )
        result: TuningResult = run_(run, run_context)
    return PromptOutcome(run.id, {"id": run.id, **msgspec.to_builtins(result)})
