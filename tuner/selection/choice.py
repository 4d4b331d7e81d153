"""Which model to choose, from rollouts of several candidates on the same tasks. Pure.

    best      the candidate that is shown to be better than every other; on ties nothing is chosen
    cheapest  the lowest cost among those shown to be less than `within` below the best

Failed rollouts count as failures in the score, and their cost counts too. A candidate without a price is never chosen
as the cheapest, and neither is any other while such a candidate might be cheaper.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ratchet.store.operation_records import Rollout
from ratchet.store.states import RolloutState
from ratchet.trainer.statistics import (
    CandidateScore,
    Mark,
    Missing,
    Ranking,
    ScoreRange,
    rank,
    within_best,
)
from ratchet.tuner.rollouts.prices import Prices, RolloutCost

Policy = Literal["best", "cheapest"]


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
    policy: Policy
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
        marks[rollout.task_id].append(_mark(rollout))
    return {task: tuple(attempts) for task, attempts in marks.items()}


def _mark(rollout: Rollout) -> Mark:
    if rollout.state is RolloutState.FAILED:
        return Missing.FAILED
    return Missing.UNJUDGED if rollout.score is None else rollout.score


def figures_of(candidate: str, rollouts: Sequence[Rollout], prices: Prices) -> Figures:
    """Return cost and duration of one candidate's rollouts."""
    over = [one for one in rollouts if not one.planned]
    spent = sum((rollout_cost(one, prices) for one in over), RolloutCost())
    seconds = sorted(_seconds(one) for one in over if one.state is RolloutState.ENDED)
    return Figures(
        candidate=candidate, spent=spent, ended=len(seconds), seconds_p50=_quantile(seconds, 0.5),
        seconds_p95=_quantile(seconds, 0.95), commonest_failure=commonest(one.failure for one in over),
        commonest_judge_failure=commonest(one.judge_failure for one in over),
    )  # fmt: skip


def rollout_cost(rollout: Rollout, prices: Prices) -> RolloutCost:
    """Return the cost of one rollout."""
    money = prices.money(rollout.model or rollout.candidate, rollout.prompt_tokens, rollout.completion_tokens)
    return RolloutCost(
        rollouts=1, prompt_tokens=rollout.prompt_tokens, completion_tokens=rollout.completion_tokens,
        seconds=_seconds(rollout), money=money,
    )  # fmt: skip


def select(
    rollouts: Sequence[Rollout],
    candidates: Sequence[str],
    prices: Prices,
    *,
    policy: Policy = "best",
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


def _seconds(rollout: Rollout) -> float:
    if rollout.started_at is None or rollout.ended_at is None:
        return 0.0
    return max(0.0, rollout.ended_at - rollout.started_at)


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
