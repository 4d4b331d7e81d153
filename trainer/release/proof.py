"""The proof of a swap: is the version that vLLM serves the one that the trainer made?"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import log2, sqrt
from statistics import fmean, quantiles

from ratchet.trainer.adapters.adapter_store import amplified
from ratchet.trainer.adapters.vllm_api import VllmServer, ask_all
from ratchet.trainer.errors import CheckpointError, TrainerError
from ratchet.trainer.learner_api import LogprobScorer
from ratchet.trainer.rows.token_row import scored_row

# The proof of a swap: is the version that vLLM serves the one that the trainer made? A pure function of logprobs.
#
# The logprobs of some tokens are known under a new version and under an old one, each as vLLM serves it and as the
# trainer computes it:
#
#     x = trained new - trained old     what the adapter should change; (T,) in nats
#     y = served new - served old       what vLLM changed
#
# y follows x if slope and correlation through the origin, over the tokens,
#
#     slope = sum(x y) / sum(x^2)       rho = sum(x y) / sqrt(sum(x^2) sum(y^2))
#
# lie in `_SLOPE` and above `_RHO`, the slope also within two standard errors (clustered by context: the root of the
# summed squares of each context's sum of x (y - slope x), over sum(x^2); Liang and Zeger 1986), and chance is very
# unlikely to be the reason. Noise whose direction is random has a correlation of rho or more with a probability of at
# most
#
#     (1 - rho^2) ** ((n - 1) / 2) / 2  n dimensions
#
# (the cap of half-angle t on the sphere measures I((n - 1) / 2, 1 / 2; sin^2 t) / 2, and I(a, b; z) <= z^a for b <= 1.)
# Tokens of one context share their noise and large changes outweigh small ones, so n is the number of contexts that the
# change is spread over: (sum X)^2 / sum X^2 with X the weighted sum of x^2 in a context. A few contexts that change by
# far the most must not decide alone: each counts at most as much as the mean one, by a weight that depends on x alone.
# A token whose y is far from its x counts with an error of at most twice the size of x, so that a single expert that is
# routed differently decides nothing.
#
# In bf16 any change of the weights rounds the whole forward pass. That moves y by about 0.05 nats whatever was trained,
# is not independent noise, and swallows a step of 0.01 nats entirely. Such a step cannot be measured under the
# version's own name; what can be is an *amplified copy*: the same weights file with `lora_alpha` times a factor, loaded
# under a name that is never served. Its change is large enough for every number format, and it follows the trainer's
# only if this replica reads the right file and applies it to the right layers. So there are two ways to a proof: the
# version's own change follows the trained one, compared with each old version (in fp32 always); or the amplified copy's
# does, and the version's own change does not contradict it: it is neither larger than the trained one nor missing where
# it should show, by more than rounding explains.

_SLOPE = (0.7, 1.3)
_SURE_SLOPE, _ERRORS = (0.6, 1.45), 2.0  # where the slope lies, also with this many standard errors more or less
_RHO = 0.9
_MAX_CHANCE = 1e-4
_OTHER_SLOPE, _OTHER_RHO = (0.55, 1.6), 0.7  # outside of both: what is served is something else
_ROUNDING = 3.0  # times the size of rounding; a larger difference is not rounding
_FLOOR = 1e-5  # nats; the error of float32 for a logprob far from 0
_MIN_CONTEXTS = 12  # to call a version wrong
_OUTLIER = 2.0  # times the size of x; the largest error of one token
_AMPLIFIED_CHANGE = (0.8, 3.2)  # nats, least and largest root mean square that an amplified copy's change should have
_ABOVE_ROUNDING = 8.0  # between them: times the size of rounding
_GOOD_ENOUGH = 2.0  # factor between the change that a copy should have and the one that it has
_MAX_FACTOR = 2.0**24
_SHOWN = 0.15  # slope; less is shown of a change that is no larger than rounding
_EXACT = 1e-3  # nats; rounding below this hides no part of a change, as that of a coarse number format does
# Of the first amplified copy's factor. A second copy is measured if the first one proves nothing: a 1.5B shape on a GPU
# served in bf16 half of a change of 1.2 nats, and four fifths and more above 1.8.
COPIES = (1.0, 4.0)


class ProofOutcome(StrEnum):
    """The outcome of a proof."""

    PROVEN = "proven"
    UNPROVEN = "unproven"  # undecided
    WRONG = "wrong"  # vLLM serves something else


@dataclass(frozen=True, slots=True)
class VersionLogprobs:
    """Logprobs (T,) of the compared tokens under one version; a served one is None if vLLM did not return it."""

    served: Sequence[float | None]
    trained: Sequence[float]


@dataclass(frozen=True, slots=True)
class AmplifiedCopy:
    """What an amplified copy answers; `base` names the old version that its change is taken from: the base model."""

    factor: float  # of lora_alpha
    logprobs: VersionLogprobs
    base: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof; `reason` says why the swap is not proven, None if it is.

    served_vs_trainer, _worst   mean and largest |served new - trained new|, nats
    served_change               mean |served new - served old| in nats, `against` the old version
    trained_change              mean |trained new - trained old| in nats
    slope, correlation          of the served on the trained change
    contexts                    number that the trained change is spread over
    factor                      of the amplified copy whose change the last six are; None: the version's own
    """

    outcome: ProofOutcome
    reason: str | None
    tokens: int
    served_vs_trainer: float
    served_vs_trainer_worst: float
    served_change: float = 0.0
    trained_change: float = 0.0
    slope: float = 0.0
    correlation: float = 0.0
    contexts: float = 0.0
    against: str = ""
    factor: float | None = None

    @property
    def holds(self) -> bool:
        return self.outcome is ProofOutcome.PROVEN


def prove(
    places: Sequence[int],
    new: VersionLogprobs,
    old: Mapping[str, VersionLogprobs],
    *,
    tolerance: float,
    amplified: AmplifiedCopy | None = None,
) -> Proof:
    """Return whether the new version is served as it was trained, compared with each old version by name.

    `places` (T,) is the number of each token's context. A mean distance between engine and trainer that exceeds the
    old versions' by more than `tolerance` nats is wrong, unless the swap is proven or a number format may cause it.
    """
    distances = _distances(new)
    if not distances or not old:
        return Proof(ProofOutcome.UNPROVEN, "there was no probe to compare", 0, 0.0, 0.0)
    changes = [_Change.between(places, new, answer, name) for name, answer in old.items()]
    decided, outcome = _decide(changes, _amplified_change(places, old, amplified))
    reason = decided.reason(outcome)
    before = max((fmean(known) for one in old.values() if (known := _distances(one))), default=0.0)
    if fmean(distances) > tolerance + before and not (decided.is_partly_shown or outcome is ProofOutcome.PROVEN):
        outcome = ProofOutcome.WRONG
        reason = (
            f"served logprobs differ by {fmean(distances):.4f} nats from the trainer's, those of older versions by "
            f"{before:.4f}: that is worse by more than the tolerance of {tolerance}"
        )
    return Proof(
        outcome, reason, len(distances), fmean(distances), max(distances),
        served_change=decided.served, trained_change=decided.trained, slope=decided.slope,
        correlation=decided.correlation, contexts=decided.contexts, against=decided.name, factor=decided.factor,
    )  # fmt: skip


def better_factor(change: float, rounding: float, factor: float = 1.0) -> float:
    """Return the factor for an amplified copy, a power of two, which changes no rounding of the weights.

    `change` is the size of the trained change at a copy with `factor` (root mean square, nats), and `rounding` the
    distance between engine and trainer under the base model, as `rounding_of`.
    """
    least, most = _AMPLIFIED_CHANGE
    wanted = min(most, max(least, _ABOVE_ROUNDING * rounding))
    if change <= 0.0:
        return _MAX_FACTOR
    if factor != 1.0 and 1 / _GOOD_ENOUGH <= change / wanted <= _GOOD_ENOUGH:
        return factor
    return float(min(_MAX_FACTOR, 2.0 ** round(log2(wanted / change * factor))))


def rounding_of(version: VersionLogprobs) -> float:
    """Return the size of the differences between engine and trainer under a version, nats."""
    return _spread(_distances(version))


def size_of(values: Sequence[float]) -> float:
    return sqrt(fmean(value * value for value in values)) if values else 0.0


def _decide(changes: Sequence[_Change], copy: _Change | None) -> tuple[_Change, ProofOutcome]:
    own = [change for change in changes if not change.follows]
    if not own:
        return min(changes, key=lambda change: change.correlation), ProofOutcome.PROVEN
    rounding = max(change.mismatch for change in changes)
    if copy is not None and copy.is_other(rounding):
        return copy, ProofOutcome.WRONG
    if copy is not None and copy.follows:
        rounding = max(rounding, copy.residual)
    # What a coarse number format does not show of a change is no contradiction; what it should not show is one.
    hidden = rounding > _EXACT
    contradicting = [change for change in own if change.is_other(rounding) and not (hidden and change.is_partly_shown)]
    if contradicting:
        return max(contradicting, key=lambda change: change.gap), ProofOutcome.WRONG
    if copy is not None:
        return copy, ProofOutcome.PROVEN if copy.follows else ProofOutcome.UNPROVEN
    return min(own, key=lambda change: change.correlation), ProofOutcome.UNPROVEN


def _amplified_change(
    places: Sequence[int], old: Mapping[str, VersionLogprobs], amplified: AmplifiedCopy | None
) -> _Change | None:
    if amplified is None:
        return None
    return _Change.between(places, amplified.logprobs, old[amplified.base], amplified.base, amplified.factor)


def _distances(version: VersionLogprobs) -> list[float]:
    return [abs(s - t) for s, t in zip(version.served, version.trained, strict=True) if s is not None]


@dataclass(frozen=True, slots=True)
class _Change:
    """How a version differs from an old one, as served (y) and as trained (x)."""

    name: str
    factor: float | None  # of an amplified copy
    tokens: int
    contexts_compared: int
    served: float  # mean |y|
    trained: float  # mean |x|
    slope: float
    slope_error: float  # its standard error
    correlation: float
    gap: float  # |y - x|, as `_spread`
    residual: float  # |y - slope x|, as `_spread`
    mismatch: float  # |served old - trained old|, as `_spread`
    contexts: float  # that x is spread over

    @staticmethod
    def between(
        places: Sequence[int], new: VersionLogprobs, old: VersionLogprobs, name: str, factor: float | None = None
    ) -> _Change:
        columns = zip(places, new.served, old.served, new.trained, old.trained, strict=True)
        known = [(c, sn - so, tn - to, so - to) for c, sn, so, tn, to in columns if sn is not None and so is not None]
        if not known:
            return _Change(name, factor, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        by_context: dict[int, float] = defaultdict(float)
        for context, _, x, _ in known:
            by_context[context] += x * x
        mean = fmean(by_context.values())
        weights = {context: min(1.0, mean / own) if own else 1.0 for context, own in by_context.items()}
        weighted = [weights[context] * own for context, own in by_context.items()]
        xx = sum(weighted)
        limit = _OUTLIER * sqrt(xx / sum(weights[context] for context, *_ in known))
        bounded = [(c, weights[c], x + min(limit, max(-limit, y - x)), x) for c, y, x, _ in known]
        xy, yy = sum(w * x * y for _, w, y, x in bounded), sum(w * y * y for _, w, y, x in bounded)
        slope = xy / xx if xx else 0.0
        residuals: dict[int, float] = defaultdict(float)
        for context, weight, y, x in bounded:
            residuals[context] += weight * x * (y - slope * x)
        return _Change(
            name,
            factor,
            len(known),
            len(by_context),
            served=fmean(abs(y) for _, y, _, _ in known),
            trained=fmean(abs(x) for _, _, x, _ in known),
            slope=slope,
            slope_error=size_of(list(residuals.values())) * sqrt(len(residuals)) / xx if xx else 0.0,
            correlation=xy / sqrt(xx * yy) if xx and yy else 0.0,
            gap=_spread([y - x for _, y, x, _ in known]),
            residual=_spread([y - slope * x for _, y, x, _ in known]),
            mismatch=_spread([off for *_, off in known]),
            contexts=xx * xx / sum(own * own for own in weighted) if xx else 0.0,
        )

    @property
    def follows(self) -> bool:
        error = _ERRORS * self.slope_error
        slope = _SLOPE[0] <= self.slope <= _SLOPE[1]
        slope = slope and _SURE_SLOPE[0] <= self.slope - error and self.slope + error <= _SURE_SLOPE[1]
        return slope and self.correlation >= _RHO and self._chance <= _MAX_CHANCE

    @property
    def _chance(self) -> float:
        """A bound on the probability that noise alone correlates as much with the trained change."""
        sine = sqrt(max(0.0, 1.0 - self.correlation**2))
        return min(1.0, 0.5 * sine ** max(self.contexts - 1.0, 0.0)) if self.correlation > 0.0 else 1.0

    def is_other(self, rounding: float) -> bool:
        """Whether the served change is clearly not the trained one; `rounding` is its size as `_spread`, nats."""
        beyond = self.gap > _ROUNDING * rounding + _FLOOR and self.contexts_compared >= _MIN_CONTEXTS
        unlike = not _OTHER_SLOPE[0] <= self.slope <= _OTHER_SLOPE[1] or self.correlation < _OTHER_RHO
        return beyond and unlike

    @property
    def is_partly_shown(self) -> bool:
        """Whether the served change may be what a coarse number format shows of the trained one."""
        return self.served <= self.trained and self.slope >= _SHOWN

    def reason(self, outcome: ProofOutcome) -> str | None:
        """Return why the swap is not proven; None if it is."""
        if outcome is ProofOutcome.PROVEN:
            return None
        if not self.tokens:
            return f"{self.name} gives every probe token too low a probability to compare"
        copy = "" if self.factor is None else f" with lora_alpha times {self.factor:g}"
        numbers = (
            f"since {self.name} the trainer's logprobs changed by {self.trained:.2g} nats{copy}, the served ones by "
            f"{self.served:.2g} (slope {self.slope:.2f}, correlation {self.correlation:.2f}, {self.tokens} tokens)"
        )
        if outcome is ProofOutcome.WRONG:
            not_applied = abs(self.slope) < 0.25 and self.served < 0.5 * self.trained
            what = (
                f"the adapter is not applied, vLLM answers as {self.name}" if not_applied else "vLLM serves another one"
            )
            return f"{what}: {numbers}"
        if self.trained == 0.0:
            return f"the adapter changes nothing: {numbers}"
        if self.correlation >= _RHO and _SLOPE[0] <= self.slope <= _SLOPE[1]:
            return f"too few contexts ({self.contexts:.1f}) to exclude chance: {numbers}"
        return f"the served change may be rounding: {numbers}"


def _spread(values: Sequence[float]) -> float:
    """Return the size of errors, nats: the 80th percentile of |value|, which a few outliers do not move."""
    if len(values) < 2:
        return abs(values[0]) if values else 0.0
    return quantiles([abs(value) for value in values], n=5, method="inclusive")[3]


# Measure a served version: compare logprobs of vLLM replicas with the trainer's, for `proof.py`.

log = logging.getLogger(__name__)

_TOKENS = 3  # most likely next tokens that are compared after each probe
_REQUESTED_TOKENS = 20  # of every version, so that those are among them; vLLM returns no more by default
_FACTORS = 3  # that are tried for an amplified copy

Probes = Sequence[Sequence[int]]  # sequences of token ids


class ProofFailed(TrainerError):
    """No replica serves the candidate as the trainer made it, or it is unproven; `proofs` are those made so far."""

    def __init__(self, reason: str, outcome: ProofOutcome, proofs: dict[str, Proof]) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.proofs = proofs


@dataclass(frozen=True, slots=True)
class ServedLogprobs:
    """What one replica answers for T tokens: `places` are the numbers of their probes, `sequences` end with them."""

    places: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    new: tuple[float | None, ...]
    old: Mapping[str, tuple[float | None, ...]]  # by the served name of an older version


class TrainerLogprobs:
    """The trainer's logprobs of a version, True or its reference, and of older ones. Nothing is computed twice: the
    replicas are mostly compared about the same tokens.
    """

    def __init__(self, scorer: LogprobScorer, version: bool | str = True) -> None:
        self._scorer = scorer
        self.version = version
        self._known: dict[bool | str, dict[tuple[int, ...], float]] = {}

    def score(self, sequences: Sequence[tuple[int, ...]], adapter: bool | str) -> list[float]:
        known = self._known.setdefault(adapter, {})
        missing = list(dict.fromkeys(sequence for sequence in sequences if sequence not in known))
        if missing:
            scored = self._scorer.score([scored_row(sequence) for sequence in missing], adapter=adapter)
            known |= {sequence: logprobs[-1] for sequence, logprobs in zip(missing, scored, strict=True)}
        return [known[sequence] for sequence in sequences]


@dataclass(frozen=True, slots=True)
class SwapProver:
    """Proves one version. `old` maps the served name of each older one to its reference, None for the base model,
    which must be among them.
    """

    name: str  # served
    reference: str
    old: Mapping[str, str | None]
    probes: Probes
    trainer: TrainerLogprobs
    tolerance: float

    def measure(self, replica: VllmServer) -> ServedLogprobs:
        """Ask a replica for the next-token logprobs after each probe. Raises EngineUnreachable, AdapterRefused."""
        new, *old = (replica.next_logprobs(name, self.probes, _REQUESTED_TOKENS) for name in (self.name, *self.old))
        compared = [
            (place, token)
            for place, likeliest in enumerate(new)
            for token in _common_tokens(likeliest, [logprobs[place] for logprobs in old])
        ]
        return ServedLogprobs(
            tuple(place for place, _ in compared),
            tuple((*self.probes[place], token) for place, token in compared),
            _picked(new, compared),
            {name: _picked(logprobs, compared) for name, logprobs in zip(self.old, old, strict=True)},
        )

    def prove(self, replicas: Sequence[VllmServer], served: Mapping[str, ServedLogprobs]) -> dict[str, Proof]:
        """Compare what replicas have answered, by URL, with the trainer. Where the version's own change is lost in
        rounding, an amplified copy is loaded, measured and unloaded; if that proves nothing, a larger one.
        """
        proofs = {url: self._compare(answer) for url, answer in served.items()}
        undecided = {url for url, proof in proofs.items() if proof.outcome is ProofOutcome.UNPROVEN}
        if not any(served[url].places for url in undecided):
            return proofs
        try:
            factor = self._choose_factor(next(served[url] for url in undecided if served[url].places))
            for larger in COPIES:
                compared = [replica for replica in replicas if replica.url in undecided]
                copies = self._measure_copies(factor * larger, compared, served) if compared else {}
                proofs |= {url: self._compare(served[url], copy) for url, copy in copies.items()}
                undecided = {url for url in copies if not proofs[url].holds}
        except CheckpointError as error:
            log.warning("event=no_amplified_copy policy=%s reason=%r", self.name, str(error))
        return proofs

    def _compare(self, served: ServedLogprobs, amplified: AmplifiedCopy | None = None) -> Proof:
        score = partial(self.trainer.score, served.sequences)
        return prove(
            served.places,
            VersionLogprobs(served.new, score(self.trainer.version)),
            {
                name: VersionLogprobs(served.old[name], score(reference or False))
                for name, reference in self.old.items()
            },
            tolerance=self.tolerance,
            amplified=amplified,
        )

    @property
    def _base(self) -> str:
        return next(name for name, reference in self.old.items() if reference is None)

    def _measure_copies(
        self, factor: float, replicas: Sequence[VllmServer], served: Mapping[str, ServedLogprobs]
    ) -> dict[str, AmplifiedCopy]:
        """Return what each replica answers under an amplified copy; one that cannot load it is left out."""
        name = f"{self.name}x{factor:g}"  # no proxy knows this name
        with amplified(self.reference, factor) as copy:

            def measure(replica: VllmServer) -> Sequence[Mapping[int, float]]:
                try:
                    replica.load(name, copy)
                    return replica.next_logprobs(name, self.probes, _REQUESTED_TOKENS)
                finally:
                    replica.unload(name)

            answers, errors = ask_all(replicas, measure, len(replicas))
            for url, error in errors.items():
                log.warning("event=no_amplified_copy policy=%s replica=%s reason=%r", self.name, url, str(error))
            return {
                url: AmplifiedCopy(
                    factor,
                    VersionLogprobs(
                        _picked(answer, [(p, s[-1]) for p, s in zip(found.places, found.sequences, strict=True)]),
                        self.trainer.score(found.sequences, copy),
                    ),
                    self._base,
                )
                for url, answer in answers.items()
                for found in (served[url],)
            }

    def _choose_factor(self, served: ServedLogprobs) -> float:
        """Return the factor with which the trainer's logprobs change by a size that no rounding hides."""
        trained = self.trainer.score(served.sequences, False)
        rounding = rounding_of(VersionLogprobs(served.old[self._base], trained))

        def change(adapter: bool | str) -> float:
            scored = self.trainer.score(served.sequences, adapter)
            return size_of([new - old for new, old in zip(scored, trained, strict=True)])

        factor = better_factor(change(self.trainer.version), rounding)
        for _ in range(_FACTORS):
            with amplified(self.reference, factor) as copy:
                better = better_factor(change(copy), rounding, factor)
            if better == factor:
                break
            factor = better
        return factor


def _picked(answer: Sequence[Mapping[int, float]], compared: Sequence[tuple[int, int]]) -> tuple[float | None, ...]:
    return tuple(answer[place].get(token) for place, token in compared)


def _common_tokens(likeliest: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> list[int]:
    """Return the most likely tokens, those first whose logprob every version returned."""
    known = sorted(likeliest, key=lambda token: (sum(token not in other for other in others), -likeliest[token]))
    return known[:_TOKENS]
