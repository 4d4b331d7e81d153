"""Invariants: does a candidate break what the live version does, on the same recent prompts? Pure; no judge.

Both versions answer each prompt as often. An answer has faults: it failed, is empty, refuses, calls a tool wrongly,
asks in place of acting, repeats itself, does not end, is much longer than another answer to the same prompt, or is much
less certain (random weights write text in which every token is unlikely). A fault never depends on which version
answered.

So if the versions behave alike, the faulty answers of a prompt fall on either version by chance alone, and the number
that falls on the candidate, over all prompts, has a known distribution: the convolution of one hypergeometric per
prompt (the exact conditional test of Cochran, Mantel and Haenszel). Its tail is the p-value of a fault. A fault rejects
if p is at most ALPHA / number of faults, and its share grew by `MIN_INCREASE`: an equal version is rejected with a
probability of at most ALPHA = 0.001, whatever the prompts, the sampling parameters and the shares (Bonferroni).

A small increase is no break: it passes, and the ramp's scores decide. With so few prompts that even the worst candidate
would pass, nothing is decided; the result says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import comb, prod
from typing import Any

ALPHA = 0.001  # probability that an equal version is rejected
MIN_INCREASE = 0.2  # of a fault's share of the answers; less is no clear break
LENGTH_RATIO = 3.0  # times the shortest answer to the same prompt
LENGTH_TOKENS = 32  # and as many tokens more
UNCERTAINTY_NATS = 1.0  # per token, above the most certain answer to the same prompt


class Fault(StrEnum):
    """What is wrong with an answer. The value is how a reason names it."""

    FAILED = "failed requests"
    EMPTY = "empty answers"
    REFUSAL = "refusals"
    INVALID_TOOL_CALL = "invalid tool calls"
    QUESTION = "questions in place of actions"
    REPETITION = "repetition"
    UNFINISHED = "answers without an end"
    LONG = "much longer answers"
    UNCERTAIN = "unlikely text"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One answer. `tokens` and `uncertainty` (mean -logprob of its tokens, nats) are None if they are not known."""

    faults: AbstractSet[Fault] = frozenset()
    tokens: int | None = None
    uncertainty: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The answers of both versions to one prompt, as many of each."""

    candidate: Sequence[CheckedAnswer]
    live: Sequence[CheckedAnswer]


@dataclass(frozen=True, slots=True)
class FaultShares:
    """The shares of each version's answers with a fault, and the p-value of the increase."""

    fault: Fault
    candidate: float
    live: float
    p_value: float
    broken: bool

    def describe(self) -> str:
        """Return it as one clause."""
        return f"{self.fault} in {self.candidate:.0%} of the answers, {self.live:.0%} by the live version"


@dataclass(frozen=True, slots=True)
class InvariantsResult:
    """The shares of all faults. `decidable`: whether a candidate could have been rejected on so many prompts."""

    prompts: int
    answers: int  # of each version
    decidable: bool
    faults: tuple[FaultShares, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the candidate clearly breaks something."""
        return any(one.broken for one in self.faults)

    def evidence(self) -> dict[str, Any]:
        """Return it in the form of a decision's evidence."""
        return {"invariants": {"broken": self.broken} | asdict(self)}

    def describe(self) -> str:
        """Return it as one clause."""
        where = f"on {self.prompts} recent prompts"
        if not self.decidable:
            return f"invariants are not decided {where}: too few"
        broken = [one.describe() for one in self.faults if one.broken]
        return f"{where} {'; '.join(broken)}" if broken else f"no invariant broken {where}"


def judge_answers(pairs: Sequence[AnswerPair]) -> InvariantsResult:
    """Return whether the candidate's answers clearly break an invariant."""
    level = ALPHA / len(Fault)
    answers = sum(len(pair.candidate) for pair in pairs)
    decidable = is_decidable([len(pair.candidate) for pair in pairs])
    marked = [_with_relative_faults(pair) for pair in pairs]
    shares = tuple(_compare(fault, marked, answers, level) for fault in Fault) if decidable else ()
    return InvariantsResult(len(pairs), answers, decidable, shares)


def is_decidable(samples: Sequence[int]) -> bool:
    """Return whether the worst candidate would be rejected, with so many answers of each version to each prompt."""
    return prod(1 / comb(2 * count, count) for count in samples) <= ALPHA / len(Fault)


def _with_relative_faults(pair: AnswerPair) -> AnswerPair:
    """Return the pair with the faults that depend on all answers to its prompt."""
    both = (*pair.candidate, *pair.live)
    shortest = min((one.tokens for one in both if one.tokens is not None), default=0)
    surest = min((one.uncertainty for one in both if one.uncertainty is not None), default=0.0)
    long_from = max(LENGTH_RATIO * shortest, shortest + LENGTH_TOKENS)

    def marked(one: CheckedAnswer) -> CheckedAnswer:
        long = {Fault.LONG} if one.tokens is not None and one.tokens > long_from else set()
        vague = one.uncertainty is not None and one.uncertainty > surest + UNCERTAINTY_NATS
        return CheckedAnswer(one.faults | long | ({Fault.UNCERTAIN} if vague else set()))

    return AnswerPair([marked(one) for one in pair.candidate], [marked(one) for one in pair.live])


def _compare(fault: Fault, pairs: Sequence[AnswerPair], answers: int, level: float) -> FaultShares:
    counts = [
        (_count(fault, pair.candidate), _count(fault, pair.live), len(pair.candidate), len(pair.live)) for pair in pairs
    ]
    candidate = sum(mine for mine, *_ in counts) / answers
    live = sum(other for _, other, *_ in counts) / max(1, sum(size for *_, size in counts))
    p_value = conditional_p_value(counts)
    return FaultShares(fault, candidate, live, p_value, p_value <= level and candidate - live >= MIN_INCREASE)


def _count(fault: Fault, answers: Sequence[CheckedAnswer]) -> int:
    return sum(fault in one.faults for one in answers)


def conditional_p_value(counts: Sequence[tuple[int, int, int, int]]) -> float:
    """Return the probability of at least as many hits on the first side, if hits fall on either side by chance.

    Each count is (hits of the first side, hits of the second, size of the first, size of the second) of one prompt.
    """
    chances, observed = [1.0], 0
    for mine, other, size, other_size in counts:
        hits, observed = mine + other, observed + mine
        ways = comb(size + other_size, hits)
        own = [comb(size, n) * comb(other_size, hits - n) / ways for n in range(min(size, hits) + 1)]
        if own == [1.0]:
            continue  # no hit: it says nothing
        summed = [0.0] * (len(chances) + len(own) - 1)
        for i, chance in enumerate(chances):
            for j, share in enumerate(own):
                summed[i + j] += chance * share
        chances = summed
    return min(1.0, sum(chances[observed:]))
