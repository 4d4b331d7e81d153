"""Start or resume a comparison of models, for `ratchet tune select-model` and `ratchet eval`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from ratchet.tuning import context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.settings.project_settings import Settings
    from ratchet.store.records.tuning import Tuning
    from ratchet.tuner.selection.choice import Selection
    from ratchet.tuner.selection.model_selection import Request
    from ratchet.tuning.context import TuningContext


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of the two commands, besides those of all commands that run rollouts."""

    kind: Literal["select-model", "eval"]
    candidates: Sequence[str]
    split: str
    limit: int | None
    score_range: tuple[float, float] | None
    resume: str | None  # id of the run to resume
    policy: Literal["best", "cheapest"] = "best"
    within: float | None = None

    @property
    def command(self) -> str:
        """The command that resumes a run of this kind."""
        return "ratchet eval" if self.kind == "eval" else f"ratchet tune {self.kind}"


def compare(settings: Settings, given: ComparisonOptions) -> tuple[Request, Selection]:
    """Run or resume a comparison; return its request and its result.

    Raises TuningError, UsageError, and the errors of `context.opened`.
    """
    with context.opened(context.with_run_settings(settings, given.resume)) as tuner_context:
        from ratchet.tuner.selection.model_selection import ModelSelector

        request, run = (
            _resume(tuner_context, given.resume, given.kind) if given.resume else _start(tuner_context, given)
        )
        with tuner_context.lease.acquire(run.id, given.command, resume=given.resume is not None) as run:
            tasks = tuner_context.tasks(request.tasks, request.split, request.limit)
            rollouts = len(tasks) * request.attempts * len(request.candidates)
            click.echo(
                f"{run.id}: {rollouts} rollouts, {len(tasks)} tasks for each of {', '.join(request.candidates)}",
                err=True,
            )
            selector = ModelSelector(
                tuner_context.store, tuner_context.runner, tuner_context.scorer, tuner_context.prices
            )
            return request, asyncio.run(selector.run(request, tasks, run))


def _start(tuner_context: TuningContext, given: ComparisonOptions) -> tuple[Request, Tuning]:
    """Check the options and start a run. Raises UsageError, TuningError."""
    import msgspec

    from ratchet.trainer.statistics.paired_comparison import ScoreRange
    from ratchet.tuner.selection.model_selection import Request, check_prices, known_models, resolved

    source = tuner_context.source()
    candidates = resolved(
        tuner_context.store, given.candidates, known_models(tuner_context.proxy_url, tuner_context.api_key)
    )
    check_prices(candidates, tuner_context.prices, given.policy)
    tuner_context.tasks(source, given.split, 1)  # fail before the run starts if the task set cannot be read
    request = Request(
        kind=given.kind, alias=tuner_context.settings.model, candidates=candidates, tasks=source, split=given.split,
        limit=given.limit, workflow=str(tuner_context.tuner.workflow), judge=tuner_context.scorer.name,
        judge_given=tuner_context.settings.trainer.get("judge"), attempts=tuner_context.tuner.attempts,
        seed=tuner_context.tuner.seed, policy=given.policy, within=given.within,
        failure_score=tuner_context.tuner.failure_score, score_range=ScoreRange(*given.score_range) if
        given.score_range else None, )  # fmt: skip
    return request, tuner_context.store.tunings.begin(request.kind, request.alias, msgspec.to_builtins(request))


def _resume(tuner_context: TuningContext, name: str, kind: str) -> tuple[Request, Tuning]:
    """Return the request of a stopped run, and the run.

    Raises UsageError if it cannot be resumed with these options.
    """
    import msgspec

    from ratchet.tuner.selection.model_selection import Request

    run = tuner_context.store.tunings.get(name)
    if run.kind != kind:
        raise click.UsageError(f"--resume {name}: that run is a {run.kind} run")
    request = msgspec.convert(run.config, Request)
    for what, now in {"workflow": str(tuner_context.tuner.workflow), "judge": tuner_context.scorer.name}.items():
        if getattr(request, what) != now:
            raise click.UsageError(
                f"--resume {name}: the run used the {what} {getattr(request, what)}, now it is {now}; use the same "
                f"{what} for the whole comparison"
            )
    return request, run


def plain(selection: Selection) -> dict[str, Any]:
    """Return a selection as JSON values, with the verdict of every pair."""
    import msgspec

    content: dict[str, Any] = msgspec.to_builtins(selection)
    for pair, values in zip(selection.ranking.pairs, content["ranking"]["pairs"], strict=True):
        values["verdict"] = str(pair.verdict)
    return content
