"""The proof of a swap: is the version that vLLM serves the one that the trainer made? A pure function of logprobs.

Four logprobs of every probe token are known: under the new version and under an old one, each as vLLM serves it and as
the trainer computes it. Differences are taken on each side first, because rounding that is the same in both versions
cancels:

    x = trained new - trained old     what the adapter should change; (T,) in nats
    y = served new - served old       what vLLM changed

A few contexts that change by far the most must not decide alone: each context counts at most as much as the mean one,
by a weight that depends on x alone. The swap is proven if the relative error e = |y - x| / |x| (norms over all tokens)
is at most 1/2 and chance is very unlikely to be the reason. An adapter that was never applied has y = noise, so e >= 1
except by chance. Geometrically, the angle between y and x is at most arcsin(e): another adapter passes only if its
change correlates by sqrt(1 - e^2) >= 0.87 with the right one, and noise, whose direction is random, falls into that cap
with a probability of at most

    e ** (n - 1) / 2                  n dimensions

(the cap of half-angle t on the sphere measures I((n - 1) / 2, 1 / 2; sin^2 t) / 2, and I(a, b; z) <= z^a for b <= 1.)
Tokens of one context share their noise and large changes outweigh small ones, so n is the number of contexts that the
change is spread over: (sum X)^2 / sum X^2 with X the weighted sum of x^2 in a context. This must hold against every old
version that is given: the one in service, and the base model, which an engine that lost the adapter answers with.

Otherwise the size of the error decides. Rounding changes the served logprobs by about as much as they differ from the
trainer's under the old version, which a proof has recorded. A much larger error is not rounding, and the version is
wrong. A smaller one leaves the swap undecided: unproven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from statistics import fmean

_MAX_ERROR = 0.5  # relative to the change
_MAX_CHANCE = 1e-4
_CLEAR_ERROR, _CLEAR_CONTEXTS = 0.25, 9.0  # chance is below 1e-5 then: such a proof may be one of two attempts
_ROUNDING = 3.0  # times the old version's distance between engine and trainer; a larger error is not rounding
_FLOOR = 1e-5  # nats; the error of float32 for a logprob far from 0
_MIN_CONTEXTS = 12  # with an error beyond rounding


class ProofOutcome(StrEnum):
    """The outcome of a proof."""

    PROVEN = "proven"
    UNPROVEN = "unproven"  # the change is lost in rounding
    WRONG = "wrong"  # vLLM serves something else


@dataclass(frozen=True, slots=True)
class VersionLogprobs:
    """Logprobs (T,) of the probe tokens under one version; a served one is None if vLLM did not return it."""

    served: Sequence[float | None]
    trained: Sequence[float]


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof; `reason` says why the swap is not proven, None if it is. All but counts are in nats.

    served_vs_trainer, _worst   mean and largest |served new - trained new|
    served_change               mean |served new - served old|, `against` the old version
    trained_change              mean |trained new - trained old|
    error                       |served change - trained change| / |trained change|, without unit
    contexts                    number that the trained change is spread over
    """

    outcome: ProofOutcome
    reason: str | None
    tokens: int
    served_vs_trainer: float
    served_vs_trainer_worst: float
    served_change: float = 0.0
    trained_change: float = 0.0
    error: float = inf
    contexts: float = 0.0
    against: str = ""

    @property
    def holds(self) -> bool:
        """Whether the swap is proven."""
        return self.outcome is ProofOutcome.PROVEN

    @property
    def is_clear(self) -> bool:
        """Whether the swap is proven with an error so small that more contexts would not change it."""
        return self.holds and self.error <= _CLEAR_ERROR and self.contexts >= _CLEAR_CONTEXTS


def prove(
    places: Sequence[int], new: VersionLogprobs, old: Mapping[str, VersionLogprobs], *, tolerance: float
) -> Proof:
    """Return whether the new version is served as it was trained, compared with each old version by name.

    `places` (T,) is the number of each token's context. A mean distance of more than `tolerance` nats between engine
    and trainer is always wrong.
    """
    distances = [abs(s - t) for s, t in zip(new.served, new.trained, strict=True) if s is not None]
    if not distances or not old:
        return Proof(ProofOutcome.UNPROVEN, "there was no probe to compare", 0, 0.0, 0.0)
    changes = [_Change.between(places, new, answer, name) for name, answer in old.items()]
    rounding = max(change.mismatch for change in changes)
    outcomes = [change.outcome(rounding) for change in changes]
    outcome = next(one for one in (ProofOutcome.WRONG, ProofOutcome.UNPROVEN, ProofOutcome.PROVEN) if one in outcomes)
    worst = max((c for c, o in zip(changes, outcomes, strict=True) if o is outcome), key=lambda change: change.error)
    reason = worst.reason(outcome)
    if fmean(distances) > tolerance:
        outcome = ProofOutcome.WRONG
        reason = (
            f"served logprobs differ by {fmean(distances):.4f} nats from the trainer's, more than the tolerance of "
            f"{tolerance}"
        )
    return Proof(
        outcome, reason, len(distances), fmean(distances), max(distances),
        served_change=worst.served, trained_change=worst.trained, error=worst.error, contexts=worst.contexts,
        against=worst.name,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Change:
    """How the new version differs from an old one, as served and as trained."""

    name: str
    tokens: int
    contexts_compared: int  # contexts
    served: float  # mean |y|
    trained: float  # mean |x|
    error: float  # |y - x| / |x|, weighted
    gap: float  # |y - x|, root of its mean square
    mismatch: float  # |served old - trained old|, root of its mean square
    contexts: float  # that x is spread over

    @staticmethod
    def between(places: Sequence[int], new: VersionLogprobs, old: VersionLogprobs, name: str) -> _Change:
        columns = zip(places, new.served, old.served, new.trained, old.trained, strict=True)
        known = [(c, sn - so, tn - to, so - to) for c, sn, so, tn, to in columns if sn is not None and so is not None]
        if not known:
            return _Change(name, 0, 0, 0.0, 0.0, inf, 0.0, 0.0, 0.0)
        by_context: dict[int, float] = defaultdict(float)
        for context, _, x, _ in known:
            by_context[context] += x * x
        mean = fmean(by_context.values())
        counts = {context: min(1.0, mean / own) if own else 1.0 for context, own in by_context.items()}
        weighted = [counts[context] * own for context, own in by_context.items()]
        size = sum(weighted)
        error = sum(counts[context] * (y - x) ** 2 for context, y, x, _ in known)
        return _Change(
            name,
            len(known),
            len(by_context),
            served=fmean(abs(y) for _, y, _, _ in known),
            trained=fmean(abs(x) for _, _, x, _ in known),
            error=sqrt(error / size) if size else inf,
            gap=sqrt(fmean((y - x) ** 2 for _, y, x, _ in known)),
            mismatch=sqrt(fmean(off * off for *_, off in known)),
            contexts=size * size / sum(own * own for own in weighted) if size else 0.0,
        )

    @property
    def _chance(self) -> float:
        """Return a bound on the probability that noise alone is this close to the trained change."""
        return min(1.0, 0.5 * self.error ** max(self.contexts - 1.0, 0.0)) if self.error <= 1.0 else 1.0

    def outcome(self, rounding: float) -> ProofOutcome:
        if self.error <= _MAX_ERROR and self._chance <= _MAX_CHANCE:
            return ProofOutcome.PROVEN
        beyond = self.gap > _ROUNDING * rounding + _FLOOR and self.contexts_compared >= _MIN_CONTEXTS
        return ProofOutcome.WRONG if beyond and self.error > _MAX_ERROR else ProofOutcome.UNPROVEN

    def reason(self, outcome: ProofOutcome) -> str | None:
        moved = f"since {self.name} the trainer's logprobs changed by {self.trained:.2g} nats, the served ones by "
        if outcome is ProofOutcome.WRONG:
            not_applied = self.served < 0.5 * self.trained
            what = (
                f"the adapter is not applied, vLLM answers as {self.name}" if not_applied else "vLLM serves another one"
            )
            return f"{what}: {moved}{self.served:.2g}"
        if outcome is ProofOutcome.PROVEN:
            return None
        if not self.tokens:
            return f"{self.name} gives every probe token too low a probability to compare"
        if self.error <= _MAX_ERROR:
            return f"{moved}{self.served:.2g}, on too few contexts ({self.contexts:.1f}) to exclude chance"
        return f"{moved}{self.served:.2g}: the two differ by {self.error:.2g} times that change, which may be rounding"
