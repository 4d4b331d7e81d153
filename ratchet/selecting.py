"""Begin, resume and run a comparison of models: what `ratchet tune select-model` and `ratchet eval` share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from ratchet import tuning

if TYPE_CHECKING:
    from ratchet.settings import Settings
    from ratchet.tuning import Bench
    from store.tuning_records import Tuning
    from trainer.tuning.select_model import Request
    from trainer.tuning.selection import Selection


def compare(settings: Settings, own: dict[str, Any]) -> tuple[Request, Selection]:
    """Run a comparison, from its beginning or from where it was stopped; return what was asked for, and what was found.

    `own`: kind, candidates, split, limit, policy, within, score_range, resume (an id, or None), command (what goes on
    with it). Raises TuningError, UsageError, and what `tuning.opened` raises.
    """
    with tuning.opened(settings) as bench:
        from trainer.tuning.select_model import ModelSelector

        request, run = _resumed(bench, own) if own["resume"] else _begun(bench, own)
        with tuning.ending(bench.store, run.id, own["command"]):
            tasks = bench.tasks(request.tasks, request.split, request.limit)
            rollouts = len(tasks) * request.attempts * len(request.candidates)
            click.echo(
                f"{run.id}: {rollouts} rollouts, {len(tasks)} tasks for each of {', '.join(request.candidates)}",
                err=True,
            )
            selector = ModelSelector(bench.store, bench.runner, bench.scorer, bench.prices)
            return request, asyncio.run(selector.run(request, tasks, run))


def _begun(bench: Bench, own: dict[str, Any]) -> tuple[Request, Tuning]:
    """Check what is asked for, and begin a run."""
    import msgspec

    from trainer.tuning.comparison import ScoreRange
    from trainer.tuning.select_model import Request, check_prices, known_models, resolved

    source = bench.source()
    candidates = resolved(bench.store, own["candidates"], known_models(bench.proxy_url, bench.api_key))
    check_prices(candidates, bench.prices, own["policy"])
    bench.tasks(source, own["split"], 1)  # a task set that cannot be read is told before a run begins
    request = Request(
        kind=own["kind"], alias=bench.settings.model, candidates=candidates, tasks=source, split=own["split"],
        limit=own["limit"], workflow=str(bench.tuner.workflow), judge=bench.scorer.name, attempts=bench.tuner.attempts,
        seed=bench.tuner.seed, policy=own["policy"], within=own["within"], failure_score=bench.tuner.failure_score,
        score_range=ScoreRange(*own["score_range"]) if own["score_range"] else None,
    )  # fmt: skip
    return request, bench.store.tunings.begin(request.kind, request.alias, msgspec.to_builtins(request))


def _resumed(bench: Bench, own: dict[str, Any]) -> tuple[Request, Tuning]:
    """Return what a run was asked for, and the run, which goes on. Raises UsageError where that is not possible."""
    import msgspec

    from trainer.tuning.select_model import Request

    name = own["resume"]
    run = bench.store.tunings.get(name)
    if run.kind != own["kind"]:
        raise click.UsageError(f"--resume {name}: that run is of another kind, {run.kind}")
    request = msgspec.convert(run.config, Request)
    for what, now in {"workflow": str(bench.tuner.workflow), "judge": bench.scorer.name}.items():
        if getattr(request, what) != now:
            raise click.UsageError(
                f"--resume {name}: its {what} was {getattr(request, what)}, now it is {now}; half of a comparison "
                f"cannot be made with another {what}"
            )
    return request, bench.store.tunings.resume(name)
