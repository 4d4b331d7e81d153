"""Begin, resume and run a comparison of models: what `ratchet tune select-model` and `ratchet eval` share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from ratchet.tuning import context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.settings import Settings
    from ratchet.store.records.tuning import Tuning
    from ratchet.tuner.selection.choice import Selection
    from ratchet.tuner.selection.model_selection import Request
    from ratchet.tuning.context import Bench


@dataclass(frozen=True)
class Asked:
    """What a command was given of its own, beside the options of everything that makes rollouts."""

    kind: Literal["select-model", "eval"]
    candidates: Sequence[str]
    split: str
    limit: int | None
    score_range: tuple[float, float] | None
    resume: str | None  # the id of the run that goes on
    policy: Literal["best", "cheapest"] = "best"
    within: float | None = None

    @property
    def command(self) -> str:
        """What goes on with a run of this kind."""
        return "ratchet eval" if self.kind == "eval" else f"ratchet tune {self.kind}"


def compare(settings: Settings, asked: Asked) -> tuple[Request, Selection]:
    """Run a comparison, from its beginning or from where it was stopped; return what it was to be, and what was found.

    Raises TuningError, UsageError, and what `context.opened` raises.
    """
    with context.opened(context.with_run_settings(settings, asked.resume)) as bench:
        from ratchet.tuner.selection.model_selection import ModelSelector

        request, run = _resumed(bench, asked.resume, asked.kind) if asked.resume else _begun(bench, asked)
        with bench.hold.on(run.id, asked.command, resume=asked.resume is not None) as run:
            tasks = bench.tasks(request.tasks, request.split, request.limit)
            rollouts = len(tasks) * request.attempts * len(request.candidates)
            click.echo(
                f"{run.id}: {rollouts} rollouts, {len(tasks)} tasks for each of {', '.join(request.candidates)}",
                err=True,
            )
            selector = ModelSelector(bench.store, bench.runner, bench.scorer, bench.prices)
            return request, asyncio.run(selector.run(request, tasks, run))


def _begun(bench: Bench, asked: Asked) -> tuple[Request, Tuning]:
    """Check what is asked for, and begin a run."""
    import msgspec

    from ratchet.trainer.statistics.paired_comparison import ScoreRange
    from ratchet.tuner.selection.model_selection import Request, check_prices, known_models, resolved

    source = bench.source()
    candidates = resolved(bench.store, asked.candidates, known_models(bench.proxy_url, bench.api_key))
    check_prices(candidates, bench.prices, asked.policy)
    bench.tasks(source, asked.split, 1)  # a task set that cannot be read is told before a run begins
    request = Request(
        kind=asked.kind, alias=bench.settings.model, candidates=candidates, tasks=source, split=asked.split,
        limit=asked.limit, workflow=str(bench.tuner.workflow), judge=bench.scorer.name,
        judge_given=bench.settings.trainer.get("judge"), attempts=bench.tuner.attempts,
        seed=bench.tuner.seed, policy=asked.policy, within=asked.within, failure_score=bench.tuner.failure_score,
        score_range=ScoreRange(*asked.score_range) if asked.score_range else None,
    )  # fmt: skip
    return request, bench.store.tunings.begin(request.kind, request.alias, msgspec.to_builtins(request))


def _resumed(bench: Bench, name: str, kind: str) -> tuple[Request, Tuning]:
    """Return what a run was asked for, and the run, which can go on. Raises UsageError where that is not possible."""
    import msgspec

    from ratchet.tuner.selection.model_selection import Request

    run = bench.store.tunings.get(name)
    if run.kind != kind:
        raise click.UsageError(f"--resume {name}: that run is of another kind, {run.kind}")
    request = msgspec.convert(run.config, Request)
    for what, now in {"workflow": str(bench.tuner.workflow), "judge": bench.scorer.name}.items():
        if getattr(request, what) != now:
            raise click.UsageError(
                f"--resume {name}: its {what} was {getattr(request, what)}, now it is {now}; half of a comparison "
                f"cannot be made with another {what}"
            )
    return request, run
