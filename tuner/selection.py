"""Model selection: the same tasks for every candidate through the proxy, one ranking, one choice. An evaluation of one
version against another is a selection between two.

    best      the candidate that is shown to be better than every other; on ties nothing is chosen
    cheapest  the lowest cost among those shown to be less than `within` below the best

A candidate is a `model_list` name or a version of an alias (`policy@3`; an alias alone is its live version at the start
of the run). Guarantees: names unknown to the proxy are refused before anything runs; candidates alternate at every
task, so drift over time affects all alike; attempt N at a task has the same seed for every candidate; a resumed run
keeps finished rollouts; a failed attempt is a failure of its candidate and stops no other, and its cost counts; the
judge sees all attempts at a task together. A candidate without a price is never chosen as the cheapest, and neither is
any other while such a candidate might be cheaper.

A release evaluation with a workflow compares candidate and live version on held-out tasks, never trained and listed by
`ratchet tune runs`; an interrupted one is resumed.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.records import Policy, Transcript
from ratchet.store.states import RELEASE_EVALUATION, RolloutState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import list_models
from ratchet.trainer.errors import TrainerError, TuningError
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.release.evaluation import (
    EvaluationResult,
    PairedEvaluation,
    Sides,
    compare_with_judge,
    version_name,
)
from ratchet.trainer.settings.trainer_settings import ReleaseSettings
from ratchet.trainer.statistics import (
    CandidateScore,
    Compared,
    Mark,
    Missing,
    Ranking,
    ScoreRange,
    rank,
    within_best,
)
from ratchet.trainer.tasks import Task, TaskSet
from ratchet.tuner.reports import TuningResult, plain, task_set
from ratchet.tuner.rollouts.prices import Prices, RolloutCost, busy_seconds, rollout_cost, seconds_of
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner, final_rollouts, first_api_key, pending_jobs
from ratchet.tuner.rollouts.scoring import RolloutScorer, RolloutTools
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.settings import TunerSettings

Choice = Literal["best", "cheapest"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and duration of a candidate. Seconds: of rollouts that returned; None if none did."""

    candidate: str
    spent: RolloutCost
    ended: int
    seconds_p50: float | None
    seconds_p95: float | None
    commonest_failure: str | None = None
    commonest_judge_failure: str | None = None

    @property
    def cost_per_rollout(self) -> float | None:
        """Mean cost of a rollout; None if the price is unknown."""
        money = self.spent.money
        return money.amount / self.spent.rollouts if money.known and self.spent.rollouts else None

    @property
    def tokens_per_rollout(self) -> float | None:
        """Mean prompt and completion tokens of a rollout; None without rollouts."""
        spent = self.spent
        return (spent.prompt_tokens + spent.completion_tokens) / spent.rollouts if spent.rollouts else None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking, the figures of each candidate, and the choice with its reason; `chosen` None: nothing shown."""

    ranking: Ranking
    figures: tuple[Figures, ...]  # in the ranking's order
    policy: Choice
    within: float | None
    chosen: str | None
    reason: str

    @property
    def measured(self) -> bool:
        """Whether any rollout was finished and judged; otherwise the ranking means nothing."""
        pairs = zip(self.figures, self.ranking.scores, strict=True)
        return any(own.ended > scored.unjudged for own, scored in pairs)


def marks_of(rollouts: Iterable[Rollout]) -> dict[str, tuple[Mark, ...]]:
    """Return the results of one candidate by task; an unfinished rollout is unjudged."""
    marks: defaultdict[str, list[Mark]] = defaultdict(list)
    for rollout in rollouts:
        marks[rollout.task_id].append(mark_of(rollout))
    return {task: tuple(attempts) for task, attempts in marks.items()}


def mark_of(rollout: Rollout | None) -> Mark:
    """Return the result of an attempt; one that is missing is unjudged."""
    if rollout is not None and rollout.state is RolloutState.FAILED:
        return Missing.FAILED
    return Missing.UNJUDGED if rollout is None or rollout.score is None else rollout.score


def figures_of(candidate: str, rollouts: Sequence[Rollout], prices: Prices) -> Figures:
    """Return cost and duration of one candidate's rollouts."""
    over = [one for one in rollouts if not one.planned]
    spent = sum((rollout_cost(one, prices) for one in over), RolloutCost())
    seconds = sorted(seconds_of(one) for one in over if one.state is RolloutState.ENDED)
    return Figures(
        candidate=candidate, spent=spent, ended=len(seconds), seconds_p50=_quantile(seconds, 0.5),
        seconds_p95=_quantile(seconds, 0.95), commonest_failure=commonest(one.failure for one in over),
        commonest_judge_failure=commonest(one.judge_failure for one in over),
    )  # fmt: skip


def select(
    rollouts: Sequence[Rollout],
    candidates: Sequence[str],
    prices: Prices,
    *,
    policy: Choice = "best",
    within: float | None = None,
    score_range: ScoreRange | None = None,
    failure_score: float = 0.0,
) -> Selection:
    """Return the ranking of at least one candidate, and the choice."""
    of = {name: [one for one in rollouts if one.candidate == name] for name in candidates}
    marks = {name: marks_of(own) for name, own in of.items()}
    ranking = rank(marks, score_range=score_range, failure_score=failure_score)
    figures = tuple(figures_of(one.candidate, of[one.candidate], prices) for one in ranking.scores)
    if policy == "best" or within is None:
        chosen, reason = _best(ranking, figures)
    else:
        close = within_best(marks, within, score_range=score_range, failure_score=failure_score)
        chosen, reason = _cheapest(figures, close, within)
    return Selection(
        ranking=ranking, figures=figures, policy=policy, within=within, chosen=chosen, reason=reason
    )  # fmt: skip


def _best(ranking: Ranking, figures: Sequence[Figures]) -> tuple[str | None, str]:
    if ranking.winner is not None:
        return ranking.winner, "it is shown to be better than every other"
    if len(ranking.scores) == 1:
        return None, "there is nothing to compare it with"
    first = [one for one in ranking.scores if one.candidate in ranking.first]
    if not any(one.ended for one in figures):
        return None, "no rollout of any candidate finished"
    if _could_change(ranking):
        return None, f"attempts that the judge failed on could change the ranking: {_unjudged(first)}"
    return None, f"{' and '.join(ranking.first)} are tied: use more tasks to show a difference"


def _could_change(ranking: Ranking) -> bool:
    """Whether unjudged attempts could make one of the first candidates the winner."""
    names = set(ranking.first)
    return any(not pair.settled for pair in ranking.pairs if {pair.candidate, pair.against} <= names)


def _unjudged(scores: Iterable[CandidateScore]) -> str:
    return ", ".join(f"{one.candidate} has {one.unjudged} unjudged" for one in scores if one.unjudged)


def _cheapest(figures: Sequence[Figures], close: Sequence[str], within: float) -> tuple[str | None, str]:
    if not close:
        return None, f"none is shown to be within {within:g} of the best: use more tasks or attempts"
    prices = {one.candidate: one.cost_per_rollout for one in figures if one.candidate in close}
    unknown = [name for name, price in prices.items() if price is None]
    if unknown:
        return None, f"the price of {' and '.join(unknown)} is unknown: set it in model_list or tuner.prices"
    chosen = min(prices, key=lambda name: prices[name] or 0.0)
    return chosen, f"it costs least of those shown to be within {within:g} of the best: {', '.join(prices)}"


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the quantile by nearest rank; None for no values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def commonest(reasons: Iterable[str | None]) -> str | None:
    """Return the commonest reason with its count, or None."""
    counted = Counter(reason for reason in reasons if reason)
    if not counted:
        return None
    ((reason, times),) = counted.most_common(1)
    return f"{reason} ({times} of {counted.total()})"


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
    policy: Choice = "best"
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


def check_prices(candidates: Sequence[str], prices: Prices, policy: Choice) -> None:
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


@dataclass
class ModelSelector:
    """Runs or resumes one selection."""

    tools: RolloutTools

    async def run(
        self, request: Request, tasks: Sequence[Task], tuning: Tuning, on_end: Callable[[Rollout], object] | None = None
    ) -> Selection:
        """Run and judge what is missing, choose, and store the result."""
        store, jobs = self.tools.store, jobs_of(request, tasks)
        await self.tools.runner.run(pending_jobs(jobs, store.rollouts.of_tuning(tuning.id)), tuning.id, on_end)
        began = time.monotonic()
        self.tools.scorer.score(_unscored(store.rollouts.of_tuning(tuning.id)))
        judging = time.monotonic() - began
        made = store.rollouts.of_tuning(tuning.id)
        found = select(
            final_rollouts(made, jobs), request.candidates, self.tools.prices, policy=request.policy,
            within=request.within, score_range=request.score_range, failure_score=request.failure_score,
        )  # fmt: skip
        result = self._result(request, tasks, found, made, judging)
        store.tunings.end(tuning.id, "done", plain(result))
        return found

    def _result(
        self, request: Request, tasks: Sequence[Task], found: Selection, made: Sequence[Rollout], judging: float
    ) -> TuningResult:
        baseline = request.candidates[0]
        best = found.chosen or found.ranking.scores[0].candidate
        if request.kind == "eval" and len(request.candidates) == 2:
            best = request.candidates[1]
        notes = [f"{found.chosen or 'none'} was chosen ({found.policy}): {found.reason}"]
        if best != baseline:
            notes.append("the gain is measured on the tasks of the choice")
        return TuningResult(
            method=request.kind, technique=f"paired comparison of {len(request.candidates)} models",
            alias=request.alias, task_set=task_set(request.tasks, request.split, [task.id for task in tasks]),
            judge=request.judge, workflow=request.workflow, attempts=request.attempts, baseline=baseline,
            best=found.chosen, gain=found.ranking.pair(best, baseline) if best != baseline else None,
            spent=self.tools.spent(made), wall_seconds=busy_seconds(made) + judging, notes=tuple(notes),
            details=msgspec.to_builtins(found),
        )  # fmt: skip


def _unscored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return all rollouts of tasks with an unscored one: a judge that ranks must see them together.

    Failed, retried and abandoned rollouts are included for their tokens.
    """
    over = [one for one in final_rollouts(rollouts) if one.state is RolloutState.ENDED]
    tasks = {one.task_id for one in over if one.score is None}
    others = (RolloutState.FAILED, RolloutState.ABANDONED)
    return [one for one in over if one.task_id in tasks] + [one for one in rollouts if one.state in others]


_NEWEST = 50  # newest runs searched for one to resume


@dataclass
class WorkflowEvaluator:
    """Runs a workflow on held-out tasks with both versions of an alias, through a running proxy.

    Failed rollouts count as failures of their version; if all of one version fail, nothing was measured and the
    evaluation has failed.
    """

    store: Store
    alias: str
    settings: ReleaseSettings
    judge: Judge
    second: Judge | None = None

    def __post_init__(self) -> None:
        self._workflow = load_workflow(self.settings.workflow or "")
        tasks = TaskSet.open(self.settings.tasks or "").rows(self.settings.split, self.settings.evaluation_prompts)
        self._tasks = list(tasks)
        self._scorer = RolloutScorer(self.store, self.judge)

    def close(self) -> None:
        self.judge.close()
        if self.second is not None:
            self.second.close()

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> EvaluationResult:
        """Return the paired comparison. Raises TuningError if nothing could be measured."""
        request = self._request(candidate, live)
        run = self._run_of(request)
        tuner = TunerSettings(concurrency=self.settings.evaluation_concurrency)
        runner = RolloutRunner(
            self.store, self._proxy_url(), first_api_key(), self._workflow, tuner, alias=self.alias, check=check
        )
        selector = ModelSelector(RolloutTools(store=self.store, runner=runner, scorer=self._scorer))
        try:
            found = asyncio.run(selector.run(request, self._tasks, run))
        except TuningError as error:
            self.store.tunings.end(run.id, TuningState.FAILED, error=str(error))
            raise
        made = final_rollouts(self.store.rollouts.of_tuning(run.id))
        self._check_measured(request, made)
        first = _evaluation(found.ranking.pair(request.candidates[1], request.candidates[0]))
        if first is None or self.second is None:
            return EvaluationResult(first, run=run.id)
        second = compare_with_judge(self.second, self._sides(request, made), "tasks")
        return EvaluationResult(first, second, self.second.name, run.id)

    def _request(self, candidate: Policy, live: Policy) -> Request:
        settings = self.settings
        return Request(
            kind="eval", alias=self.alias, candidates=(version_name(live), version_name(candidate)),
            tasks=str(settings.tasks),
            split=settings.split, workflow=str(settings.workflow), judge=self._scorer.name,
            limit=settings.evaluation_prompts, attempts=settings.evaluation_samples,
        )  # fmt: skip

    def _run_of(self, request: Request) -> Tuning:
        """Resume the interrupted run of this evaluation, or start one."""
        config = json.loads(msgspec.json.encode(request)) | {RELEASE_EVALUATION: True}  # as the store returns it
        for one in self.store.tunings.page("eval", limit=_NEWEST, state=TuningState.RUNNING):
            if one.alias == self.alias and dict(one.config) == config:
                return self.store.tunings.resume(one.id)
        return self.store.tunings.begin("eval", self.alias, config)

    def _proxy_url(self) -> str:
        if self.settings.proxy_url is not None:
            return self.settings.proxy_url
        instances = self.store.proxy_instances.running(self.alias, time.time() - PROXY_TIMEOUT_SECONDS)
        if not instances:
            raise TuningError(f"no proxy serves {self.alias}: the workflow has no endpoint; start `ratchet proxy`")
        return max(instances, key=lambda instance: instance.heartbeat_at).url

    def _check_measured(self, request: Request, made: Sequence[Rollout]) -> None:
        for name in request.candidates:
            own = [one for one in made if one.candidate == name]
            failed = [one for one in own if one.state is RolloutState.FAILED]
            if own and len(failed) == len(own):
                raise TuningError(f"all {len(own)} rollouts failed of {name}, e.g. {failed[0].failure}")

    def _sides(self, request: Request, made: Sequence[Rollout]) -> list[Sides]:
        """Return the finished trajectories of candidate and live version, by task."""
        live, candidate = request.candidates
        sides: dict[str, Mapping[str, list[Transcript]]] = {}
        for one in made:
            if one.state is RolloutState.ENDED:
                sides.setdefault(one.task_id, {live: [], candidate: []})[one.candidate].append(
                    self.store.trajectories.read(one.id)
                )
        return [(side[candidate], side[live]) for side in sides.values() if side[candidate] and side[live]]


def _evaluation(pair: Compared) -> PairedEvaluation | None:
    if pair.mean is None or pair.against_mean is None or pair.difference is None:
        return None
    return PairedEvaluation(
        pair.tasks, pair.unjudged, pair.mean, pair.against_mean, pair.difference, pair.low, pair.high, what="tasks"
    )
