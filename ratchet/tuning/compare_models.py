"""Start or resume a comparison of models: `ratchet tune select-model`, `ratchet eval`, and the same in Python."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.tuning import context
from ratchet.tuning.caller import COMMAND, RunCaller
from ratchet.tuning.run_services import run_services

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Tuning
    from ratchet.tuner.selection.choice import Selection
    from ratchet.tuner.selection.model_selection import Request
    from ratchet.tuning.context import TuningContext


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, besides the settings of all runs with rollouts."""

    kind: Literal["select-model", "eval"]
    candidates: Sequence[str]  # eval: none, or the model and the one that it is compared with first
    split: str
    limit: int | None
    score_range: tuple[float, float] | None
    resume: str | None  # id of the run to resume
    policy: Literal["best", "cheapest"] = "best"
    within: float | None = None
    may_be_one: bool = False  # the first candidate is a default: left out if the second one is the same version

    def check(self) -> None:
        """Raise InvalidArgument if the options contradict each other."""
        if self.kind == "select-model" and self.resume is None and len(self.candidates) < 2:
            raise InvalidArgument("name at least two candidates: --candidate NAME --candidate NAME (in Python models=)")
        if (self.policy == "cheapest") != (self.within is not None):
            raise InvalidArgument("--policy cheapest needs --within X, and the other way round")
        if self.score_range and self.score_range[0] >= self.score_range[1]:
            raise InvalidArgument("--score-range LOW HIGH: LOW must be below HIGH")

    def check_same(self, candidates: Sequence[str]) -> None:
        """Raise InvalidArgument if the resumed run has other candidates than those that are given."""
        if self.kind == "select-model" and self.candidates and set(self.candidates) != set(candidates):
            raise InvalidArgument(
                f"--resume {self.resume} uses the candidates of that run, {', '.join(candidates)}: leave --candidate "
                "(in Python models=) out"
            )


def compare(settings: Settings, given: ComparisonOptions, caller: RunCaller = COMMAND) -> tuple[Request, Selection]:
    """Run or resume a comparison, with services for it if none run; return its request and its result.

    Raises TuningError, InvalidArgument, and the errors of `context.opened` and `run_services`.
    """
    given.check()
    models = given.candidates
    if given.resume is not None:
        models = context.stored_run(settings, given.resume, given.kind).config["candidates"]
        given.check_same(models)
        settings = context.with_run_settings(settings, given.resume)
    with (
        run_services(settings, caller, models, lambda: _check_usable(settings, given, caller)),
        context.opened(settings, caller) as tuner_context,
    ):
        from ratchet.tuner.selection.model_selection import ModelSelector

        request, run = _resume(tuner_context, given.resume) if given.resume else _start(tuner_context, given)
        with tuner_context.lease.acquire(run.id, resume=given.resume is not None) as run:
            tasks = tuner_context.tasks(request.tasks, request.split, request.limit)
            rollouts = len(tasks) * request.attempts * len(request.candidates)
            print_note(f"{run.id}: {rollouts} rollouts, {len(tasks)} tasks for each of {', '.join(request.candidates)}")
            selector = ModelSelector(
                tuner_context.store, tuner_context.runner, tuner_context.scorer, tuner_context.prices
            )
            return request, asyncio.run(selector.run(request, tasks, run))


def _check_usable(settings: Settings, given: ComparisonOptions, caller: RunCaller) -> None:
    if given.resume is None:
        context.check_usable(settings, caller, given.split)


def _start(tuner_context: TuningContext, given: ComparisonOptions) -> tuple[Request, Tuning]:
    """Check the options and start a run. Raises InvalidArgument, TuningError."""
    import msgspec

    from ratchet.trainer.statistics import ScoreRange
    from ratchet.tuner.selection.model_selection import Request, check_prices, known_models, resolved

    source, store = tuner_context.source(), tuner_context.store
    known, named = known_models(tuner_context.proxy_url, tuner_context.api_key), given.candidates
    if given.may_be_one and len({resolved(store, [name], known) for name in named}) == 1:
        named = named[-1:]
    candidates = resolved(store, named, known)
    check_prices(candidates, tuner_context.prices, given.policy)
    tuner_context.tasks(source, given.split, 1)  # fail before the run starts if the task set cannot be read
    request = Request(
        kind=given.kind, alias=tuner_context.settings.model, candidates=candidates, tasks=source, split=given.split,
        limit=given.limit, workflow=tuner_context.workflow, judge=tuner_context.scorer.name,
        judge_given=tuner_context.settings.trainer.get("judge"), attempts=tuner_context.tuner.attempts,
        seed=tuner_context.tuner.seed, policy=given.policy, within=given.within,
        failure_score=tuner_context.tuner.failure_score, score_range=ScoreRange(*given.score_range) if
        given.score_range else None, )  # fmt: skip
    return request, store.tunings.begin(request.kind, request.alias, msgspec.to_builtins(request))


def _resume(tuner_context: TuningContext, name: str) -> tuple[Request, Tuning]:
    """Return the request of a stopped run, and the run.

    Raises InvalidArgument if it cannot be resumed with these options.
    """
    import msgspec

    from ratchet.tuner.selection.model_selection import Request

    run = tuner_context.store.tunings.get(name)
    request = msgspec.convert(run.config, Request)
    for what, now in {"workflow": tuner_context.workflow, "judge": tuner_context.scorer.name}.items():
        if getattr(request, what) != now:
            raise InvalidArgument(
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
