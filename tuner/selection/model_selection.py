"""Model selection: the same tasks for every candidate through the proxy, one ranking, one choice. An evaluation of one
version against another is a selection between two.

A candidate is a `model_list` name or a version of an alias (`policy@3`; an alias alone is its live version at the start
of the run). Guarantees: names unknown to the proxy are refused before anything runs; candidates alternate at every
task, so drift over time affects all alike; attempt N at a task has the same seed for every candidate; a resumed run
keeps finished rollouts; a failed attempt is a failure of its candidate and stops no other; the judge sees all attempts
at a task together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import list_models
from ratchet.trainer.errors import TrainerError, TuningError
from ratchet.trainer.statistics import ScoreRange
from ratchet.trainer.tasks import Task
from ratchet.tuner.reports.tuning_result import TuningResult, plain, task_set
from ratchet.tuner.rollouts.prices import Prices
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner, final_rollouts, pending_jobs
from ratchet.tuner.rollouts.scoring import RolloutScorer
from ratchet.tuner.selection.choice import Policy, Selection, rollout_cost, select


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a run: the tuning's `config`, from which it is resumed."""

    kind: Literal["select-model", "eval"] = "select-model"
    alias: str
    candidates: tuple[str, ...]  # the first is the baseline of the gain
    tasks: str  # the source of the task set
    split: str
    workflow: str
    judge: str  # name and version
    judge_given: Any = None  # as given, so that a resumed run loads the same judge
    limit: int | None = None
    attempts: int = 1
    seed: int = 0
    policy: Policy = "best"
    within: float | None = None
    failure_score: float = 0.0
    score_range: ScoreRange | None = None


def known_models(proxy_url: str, api_key: str | None) -> list[str]:
    """Return the model names of the proxy. Raises TuningError."""
    try:
        return [card["id"] for card in list_models(proxy_url.rstrip("/").removesuffix("/v1"), api_key)]
    except TrainerError as error:
        raise TuningError(
            f"the proxy at {proxy_url} does not list its models ({error.__cause__ or error}); is it running "
            "(`ratchet up`), is --proxy its URL, and does it accept the key?"
        ) from error


def resolved(store: Store, candidates: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the candidates with aliases resolved to versions. Raises TuningError for unknown or repeated ones."""
    unknown = [name for name in candidates if name not in known]
    if unknown:
        raise TuningError(
            f"{', '.join(unknown)}: unknown to the proxy, which serves {', '.join(known)}; add others to model_list"
        )
    live = {alias: f"{alias}@{policy.version}" for alias, policy in store.policies.live().items()}
    names = tuple(live.get(name, name) for name in candidates)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TuningError(
            f"{', '.join(twice)} is given twice (an alias is its live version): name two different ones, such as "
            "version 0 of an alias; for several attempts at a task use --attempts"
        )
    return names


def check_prices(candidates: Sequence[str], prices: Prices, policy: Policy) -> None:
    """Raise TuningError if the policy is cheapest and a price is unknown."""
    unknown = [name for name in candidates if prices.of(name) is None] if policy == "cheapest" else []
    if unknown:
        raise TuningError(
            f"--policy cheapest: the price of {', '.join(unknown)} is unknown; set input_cost_per_token and "
            "output_cost_per_token under model_info of its model_list entry, or under tuner.prices for an alias"
        )


def jobs_of(request: Request, tasks: Sequence[Task]) -> list[RolloutJob]:
    """Return all jobs in order of their start: candidates alternate, and each is first equally often."""
    return [
        job
        for attempt in range(request.attempts)
        for place, task in enumerate(tasks)
        for job in jobs_of_task(task, place, attempt, request.candidates, request.seed)
    ]


def jobs_of_task(
    task: Task, place: int, attempt: int, candidates: tuple[str, ...], random_seed: int
) -> list[RolloutJob]:
    """Return the jobs of one attempt at a task, the `place`-th: one for each candidate, all with the same seed."""
    seed = random.Random(f"{random_seed}:{task.id}:{attempt}").getrandbits(31)
    turn = (place + attempt) % len(candidates)
    order = candidates[turn:] + candidates[:turn]
    return [RolloutJob(task, attempt, name, name, scenario={"seed": seed}) for name in order]


class ModelSelector:
    """Runs or resumes one selection."""

    def __init__(self, store: Store, runner: RolloutRunner, scorer: RolloutScorer, prices: Prices) -> None:
        self._store = store
        self._runner = runner
        self._scorer = scorer
        self._prices = prices

    async def run(
        self, request: Request, tasks: Sequence[Task], tuning: Tuning, on_end: Callable[[Rollout], object] | None = None
    ) -> Selection:
        """Run and judge what is missing, choose, and store the result."""
        jobs = jobs_of(request, tasks)
        await self._runner.run(pending_jobs(jobs, self._store.rollouts.of_tuning(tuning.id)), tuning.id, on_end)
        began = time.monotonic()
        self._scorer.score(_unscored(self._store.rollouts.of_tuning(tuning.id)))
        judging = time.monotonic() - began
        made = self._store.rollouts.of_tuning(tuning.id)
        found = select(
            _of_jobs(final_rollouts(made), jobs), request.candidates, self._prices, policy=request.policy,
            within=request.within, score_range=request.score_range, failure_score=request.failure_score,
        )  # fmt: skip
        result = self._result(request, tasks, found, made, judging)
        self._store.tunings.end(tuning.id, "done", plain(result))
        return found

    def _result(
        self, request: Request, tasks: Sequence[Task], found: Selection, made: Sequence[Rollout], judging: float
    ) -> TuningResult:
        baseline = request.candidates[0]
        best = found.chosen or found.ranking.scores[0].candidate
        if request.kind == "eval" and len(request.candidates) == 2:
            best = request.candidates[1]
        over = (one for one in made if not one.planned)
        spent = sum((rollout_cost(one, self._prices) for one in over), self._scorer.spent)
        notes = [f"{found.chosen or 'none'} was chosen ({found.policy}): {found.reason}"]
        if best != baseline:
            notes.append("the gain is measured on the tasks of the choice")
        return TuningResult(
            method=request.kind, technique=f"paired comparison of {len(request.candidates)} models",
            alias=request.alias, task_set=task_set(request.tasks, request.split, [task.id for task in tasks]),
            judge=request.judge, workflow=request.workflow, attempts=request.attempts, baseline=baseline,
            best=found.chosen, gain=found.ranking.pair(best, baseline) if best != baseline else None, spent=spent,
            wall_seconds=busy_seconds(made) + judging, notes=tuple(notes), details=_details(found),
        )  # fmt: skip


def busy_seconds(rollouts: Iterable[Rollout]) -> float:
    """Return the seconds during which at least one rollout ran."""
    total = over = 0.0
    spans = sorted((one.started_at, one.ended_at) for one in rollouts if one.started_at and one.ended_at)
    for began, ended in spans:
        total += max(0.0, ended - max(began, over))
        over = max(over, ended)
    return total


def _unscored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return all rollouts of tasks with an unscored one: a judge that ranks must see them together.

    Failed, retried and abandoned rollouts are included for their tokens.
    """
    over = [one for one in final_rollouts(rollouts) if one.state is RolloutState.ENDED]
    tasks = {one.task_id for one in over if one.score is None}
    others = (RolloutState.FAILED, RolloutState.ABANDONED)
    return [one for one in over if one.task_id in tasks] + [one for one in rollouts if one.state in others]


def _of_jobs(rollouts: Iterable[Rollout], jobs: Sequence[RolloutJob]) -> list[Rollout]:
    """Return the rollouts of these jobs."""
    places = {job.key for job in jobs}
    return [one for one in rollouts if (one.candidate, one.task_id, one.attempt, one.step) in places]


def _details(found: Selection) -> Mapping[str, object]:
    content: dict[str, object] = msgspec.to_builtins(found)
    return content
