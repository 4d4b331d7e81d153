"""`ratchet doctor --workflow`: a few rollouts of one task, and every reason why training on them would have no effect.

The rollouts run through the real proxy with purpose `eval`: they are never trained and dropped at once. Each step
passes, or fails with all reasons and remedies. A step without data is not reported, so it never counts as passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx

from ratchet.api import context
from ratchet.checks.check_result import CheckResult, call_proxy
from ratchet.settings.project_settings import Settings
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.reasons import DropReason
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.tasks import Task, checked, content_id
from ratchet.tuner.rollouts import diagnosis
from ratchet.tuner.rollouts.prices import seconds_of
from ratchet.tuner.rollouts.runner import RolloutJob
from ratchet.tuner.tasks import ImportedTasks

if TYPE_CHECKING:
    from ratchet.store.operation_records import Rollout
    from ratchet.store.records import Transcript
    from ratchet.store.store import Store
    from ratchet.tuner.rollouts.diagnosis import Reason

_PATIENCE = 10.0  # seconds
_STEPS = ("rollouts", "calls", "tokens", "attempts", "judge", "scores", "groups", "settings")
_NO_PROXY = "start the project with `ratchet up --detach`, or give --proxy URL"


def task_of(text: str, settings: Settings) -> Task:
    """Return the task: a JSON object, a file with one, or the first row of a task set.

    Raises UsageError, TaskSetError.
    """
    row = _object(text)
    if row is None:
        tasks = ImportedTasks(settings.state.tasks).open(text)
        return next(tasks.rows(tasks.splits()[0], 1))
    row = dict(checked(row, "--task"))
    return Task(content_id(row), row, "train", 1, "doctor")


def _object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object, or a .json file with one; None for anything else."""
    file = Path(text)
    is_json = text.lstrip().startswith("{")
    if not is_json and (file.suffix != ".json" or not file.is_file()):
        return None
    try:
        found = json.loads(text if is_json else file.read_text())
    except ValueError as error:
        if is_json:
            raise click.UsageError(f"--task: not JSON: {error}") from error
        return None
    return found if isinstance(found, dict) else None


def run_checks(settings: Settings, task: Task) -> Iterator[CheckResult]:
    """Yield the results of each step. Raises WorkflowError or JudgeError if the workflow or judge cannot be loaded."""
    attempts = settings.tuner.attempts
    reporting = settings.changed(tuner={"max_failures": attempts, **settings.given_in("tuner")})  # of all failures
    with context.opened(reporting) as tuner_context:
        proxy = _proxy(tuner_context.proxy_url)
        yield proxy
        if not proxy.passed:
            return
        run = tuner_context.store.tunings.begin(
            "doctor", settings.model, {"workflow": tuner_context.tuner.workflow, "task": task.id}
        )
        with tuner_context.lease.acquire(run.id):
            jobs = [RolloutJob(task, number, candidate="doctor") for number in range(attempts)]
            rollouts = asyncio.run(tuner_context.runner.run(jobs, run.id))
            rollouts = tuner_context.scorer.score(rollouts)
            transcripts = _transcripts(tuner_context.store, rollouts)
            reasons = _reasons(settings, tuner_context, task, rollouts, transcripts)
            blind = any(reason.about == "tokens" for reason in reasons)
            yield from _by_step(reasons, _seen(rollouts, transcripts, blind))
            _drop(tuner_context.store, transcripts)
            tuner_context.store.tunings.end(run.id, "done", {"reasons": [reason.seen for reason in reasons]})


def _proxy(url: str) -> CheckResult:
    try:
        call_proxy("GET", f"{url}/health/live", _PATIENCE).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return CheckResult("proxy", False, f"{url} does not answer like a proxy: {error}", _NO_PROXY)
    return CheckResult("proxy", True, f"{url} answers")


def _transcripts(store: Store, rollouts: list[Rollout]) -> list[Transcript]:
    found = []
    for one in rollouts:
        with contextlib.suppress(RecordNotFound):
            found.append(store.trajectories.read(one.id))
    return found


def _reasons(
    settings: Settings,
    tuner_context: context.TuningContext,
    task: Task,
    rollouts: list[Rollout],
    transcripts: list[Transcript],
) -> list[Reason]:
    trainer = settings.trainer
    roles = Roles(trainer.roles, trainer.role_patterns)
    max_seconds = max((seconds_of(one) for one in rollouts), default=0.0)
    with context.judge_of(settings) as judge:
        return [
            *diagnosis.rollout_problems(rollouts),
            *diagnosis.call_problems(transcripts, task.id, settings.model, roles),
            *diagnosis.judge_problems(judge, transcripts[0] if transcripts else None),
            *diagnosis.score_problems(rollouts),
            *diagnosis.setting_problems(trainer, tuner_context.tuner, max_seconds),
        ]


def _seen(rollouts: list[Rollout], transcripts: list[Transcript], blind: bool) -> dict[str, str]:
    """Describe what each step observed, without steps that had no data (`blind`: no token)."""
    calls = [call for one in transcripts for call in one.calls]
    tokens = sum(call.completion_tokens for call in calls)
    scores = sorted(one.score for one in rollouts if one.score is not None)
    known = {
        "rollouts": f"{len(rollouts)} attempts ended, the slowest in {max(map(seconds_of, rollouts)):.1f} s",
        "calls": f"{len(calls)} calls in {len(transcripts)} trajectories, all attributed to the task",
        "tokens": f"{tokens} sampled tokens, with ids and logprobs",
        "attempts": "they differ" if len(rollouts) > 1 else "one attempt cannot differ; use --attempts 4",
        "judge": "it distinguishes answers",
        "scores": f"from {scores[0]:g} to {scores[-1]:g}" if scores else "none",
        "groups": "attempts form a group in time",
        "settings": "they allow training",
    }
    unseen = {"tokens": not tokens, "attempts": blind or not tokens, "judge": not transcripts, "scores": not scores}
    return {step: seen for step, seen in known.items() if not unseen.get(step)}


def _by_step(reasons: list[Reason], seen: dict[str, str]) -> Iterator[CheckResult]:
    for step in _STEPS:
        here = [reason for reason in reasons if reason.about == step]
        if not here and step in seen:
            yield CheckResult(step, True, seen[step])
        yield from (CheckResult(step, False, reason.seen, reason.remedy) for reason in here)


def _drop(store: Store, transcripts: list[Transcript]) -> None:
    """Drop the attempts. A running trainer may have done so already."""
    for one in transcripts:
        with contextlib.suppress(InvalidTransition):
            store.trajectories.seal(one.trajectory.id, time.time())
            store.trajectories.drop([one.trajectory.id], DropReason.DOCTOR)
