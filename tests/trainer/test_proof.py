"""What a proof of a swap can and cannot tell: the real decision over simulated engines, with error rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import sqrt

import numpy
import pytest
from numpy.typing import NDArray

from ratchet.trainer.release.proof import (
    COPIES,
    AmplifiedCopy,
    Proof,
    ProofOutcome,
    VersionLogprobs,
    better_factor,
    prove,
    rounding_of,
)

CONTEXTS, TOKENS = 24, 3  # what a publication asks for
PLACES = [place for place in range(CONTEXTS) for _ in range(TOKENS)]
CHANGES = [1e-4, 0.014, 0.066, 0.2, 0.6]  # nats, root mean square of what a version changes of the base model
FP32 = (1e-6, None, False)
# Rounding in nats, degrees of freedom of its tails (None: normal) and whether the trainer rounds as well.
BF16 = [
    (0.05, None, False),
    (0.05, None, True),
    (0.12, None, True),
    (0.07, 3, False),
    (0.12, 3, True),
    (0.14, None, False),
]

# Share of a change that bf16 serves, by its size in nats: measured on SmolLM2-135M with the real vLLM on a CPU and on a
# 1.5B shape with random weights on an H200, whose rounding is 0.14 nats.
_SHARES = {
    False: ((0.003, 0.014, 0.066, 0.184, 0.573, 1.0), (0.0, 0.0, 0.25, 0.46, 0.85, 0.95)),
    True: ((0.003, 0.12, 0.61, 1.21, 1.79, 3.44), (0.0, 0.05, 0.30, 0.55, 0.77, 1.0)),
}

Numbers = NDArray[numpy.float64]


@dataclass
class SimulatedEngine:
    """An engine and a trainer of one model. Any change of the weights rounds the engine's logprobs, and is served
    as the format allows; a part of the rounding is the same in all versions.
    """

    dice: numpy.random.Generator
    noise: float
    tails: int | None
    trainer_rounds: bool

    def effect(self, size: float) -> Numbers:
        """What an adapter changes: more in some contexts than in others, tokens of a context by turns up and down."""
        scale = self.dice.lognormal(0.0, 0.7, CONTEXTS).repeat(TOKENS)
        drawn = scale * self.dice.standard_normal(CONTEXTS * TOKENS)
        return numpy.asarray(size * drawn / sqrt(float((drawn**2).mean())))

    def rounding(self) -> Numbers:
        number = CONTEXTS * TOKENS
        drawn = self.dice.standard_t(self.tails, number) if self.tails else self.dice.standard_normal(number)
        return numpy.asarray(self.noise * drawn)

    def arrives(self, change: Numbers) -> Numbers:
        if self.noise < 1e-3:
            return change
        size = sqrt(float((change**2).mean()))
        sizes, shares = _SHARES[self.noise > 0.13]
        return change * float(numpy.interp(numpy.log(max(size, 1e-9)), numpy.log(sizes), shares))

    def proof(
        self, trained: Numbers, served: Numbers, *, copy: Numbers | None = None, live: Numbers | None = None
    ) -> Proof:
        """Prove a version that changes the base model by `trained` and is served as `served`. The adapter file that
        the engine amplifies changes it by `copy`, if that is not `trained`.
        """
        always = 0.5 * self.rounding()

        def version(served_change: Numbers, trained_change: Numbers) -> VersionLogprobs:
            by_engine = -2.0 + self.arrives(served_change) + always + 0.87 * self.rounding()
            by_trainer = -2.0 + trained_change + (self.rounding() if self.trainer_rounds else 0.0)
            return VersionLogprobs([float(v) for v in by_engine], [float(v) for v in by_trainer])

        nothing = numpy.zeros_like(trained)
        base, new = version(nothing, nothing), version(served, trained)
        old = {"agent@0": base} | ({"agent@1": version(live, live)} if live is not None else {})
        first = prove(PLACES, new, old, tolerance=0.1)
        if first.outcome is not ProofOutcome.UNPROVEN:
            return first
        factor = better_factor(sqrt(float((trained**2).mean())), rounding_of(base))
        for larger in COPIES:
            applied = larger * factor * (trained if copy is None else copy)
            amplified = AmplifiedCopy(larger * factor, version(applied, larger * factor * trained), "agent@0")
            found = prove(PLACES, new, old, tolerance=0.1, amplified=amplified)
            if found.holds:
                break
        return found


def applied(world: SimulatedEngine, change: float) -> Proof:
    right = world.effect(change)
    return world.proof(right, right)


def applied_after_others(world: SimulatedEngine, change: float) -> Proof:
    """A small step from a live version that is far from the base model."""
    live = world.effect(5 * change)
    right = live + world.effect(change)
    return world.proof(right, right, live=live)


def never_applied(world: SimulatedEngine, change: float) -> Proof:
    right = world.effect(change)
    return world.proof(right, 0 * right, copy=0 * right)


def another_adapter(world: SimulatedEngine, change: float) -> Proof:
    """One that was trained for the same: what it changes correlates by a half."""
    right = world.effect(change)
    other = 0.5 * right + sqrt(0.75) * world.effect(change)
    return world.proof(right, other, copy=other)


def half_of_it(world: SimulatedEngine, change: float) -> Proof:
    right = world.effect(change)
    return world.proof(right, 0.5 * right, copy=0.5 * right)


def a_stale_file(world: SimulatedEngine, change: float) -> Proof:
    """The first version's file under the second one's name; the two steps point into different directions."""
    live = world.effect(change)
    return world.proof(live + world.effect(change), live, copy=live, live=live)


def the_copy_under_the_served_name(world: SimulatedEngine, change: float) -> Proof:
    right = world.effect(change)
    return world.proof(right, max(8.0, better_factor(change, 1.3 * world.noise)) * right)


def outcomes(
    case: object, formats: list[tuple[float, int | None, bool]], trials: int
) -> dict[str, Counter[ProofOutcome]]:
    """Return the outcomes of a case by number format and size of the change."""
    found = {}
    for noise, tails, trainer in formats:
        for change in CHANGES:
            dice = numpy.random.default_rng([round(1e7 * change), round(1e7 * noise), tails or 0, trainer])
            proofs = (case(SimulatedEngine(dice, noise, tails, trainer), change) for _ in range(trials))  # type: ignore[operator]
            found[f"noise {noise}, tails {tails}, trainer {trainer}, change {change}"] = Counter(
                p.outcome for p in proofs
            )
    return found


WRONG_CASES = [never_applied, another_adapter, half_of_it, a_stale_file, the_copy_under_the_served_name]


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG_CASES)
def test_what_is_not_the_new_version_is_never_called_proven(case: object) -> None:
    """2,100 decisions each: a true rate of 2e-3 would show with a probability of 97%."""
    found = outcomes(case, [FP32, *BF16], 60)
    proven = {what: counts[ProofOutcome.PROVEN] for what, counts in found.items()}
    # By chance a stale file changes the compared tokens almost as the right one does.
    assert sum(proven.values()) <= (0.015 * 60 * len(proven) if case is a_stale_file else 0), proven


@pytest.mark.parametrize("case", WRONG_CASES)
def test_what_is_not_the_new_version_is_rejected_and_not_waited_for(case: object) -> None:
    least = 0.6 if case is a_stale_file else 0.8
    for what, found in outcomes(case, [FP32, *BF16[:2]], 40).items():
        assert found[ProofOutcome.WRONG] >= least * 40, (what, found)


@pytest.mark.parametrize("case", [applied, applied_after_others])
def test_an_applied_adapter_is_proven_whatever_its_size_also_in_bf16(case: object) -> None:
    for what, found in outcomes(case, [FP32, *BF16], 40).items():
        assert found[ProofOutcome.PROVEN] >= 0.85 * 40, (what, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", [applied, applied_after_others])
def test_rounding_rejects_an_applied_adapter_in_at_most_one_proof_of_a_hundred(case: object) -> None:
    found = outcomes(case, [FP32, *BF16], 100)
    wrong = {what: counts[ProofOutcome.WRONG] for what, counts in found.items()}
    assert max(wrong.values()) <= 3, wrong
    assert sum(wrong.values()) <= 0.01 * 100 * len(wrong), wrong


def test_a_proof_says_what_it_could_not_compare() -> None:
    new, old = VersionLogprobs([-1.0] * 3, [-1.0] * 3), VersionLogprobs([None] * 3, [-9.0] * 3)
    assert "no probe" in str(prove([], VersionLogprobs([], []), {}, tolerance=0.1).reason)
    found = prove([0, 1, 2], new, {"agent@1": old}, tolerance=0.1)
    assert (found.outcome, "agent@1 gives every probe token too low" in str(found.reason)) == (
        ProofOutcome.UNPROVEN,
        True,
    )
    few = prove([0, 0, 0], new, {"agent@1": VersionLogprobs([-1.1] * 3, [-1.1] * 3)}, tolerance=0.1)
    assert few.outcome is ProofOutcome.PROVEN or "too few contexts (1.0)" in str(few.reason)
    same = VersionLogprobs([-1.0] * 72, [-1.0] * 72)
    nothing = prove(PLACES, same, {"agent@0": same}, tolerance=0.1)
    assert (nothing.outcome, "changes nothing" in str(nothing.reason)) == (ProofOutcome.UNPROVEN, True)


def test_a_distance_that_the_base_model_has_as_well_rejects_no_version() -> None:
    """Mixtures of experts differ by more than the tolerance in every version; one that is far worse is wrong."""
    dice = numpy.random.default_rng(5)
    world = SimulatedEngine(dice, 0.25, None, False)
    assert world.proof(right := world.effect(0.6), right).outcome is not ProofOutcome.WRONG
    far = [-2.0 + float(v) for v in dice.standard_normal(72)]
    found = prove(
        PLACES, VersionLogprobs(far, [-2.0] * 72), {"agent@0": VersionLogprobs([-2.0] * 72, [-2.0] * 72)}, tolerance=0.1
    )
    assert (found.outcome, "tolerance of 0.1" in str(found.reason)) == (ProofOutcome.WRONG, True)
