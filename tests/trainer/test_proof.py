"""What a proof of a swap can and cannot tell: the real decision over simulated engines, with error rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy
import pytest
from numpy.typing import NDArray

from ratchet.trainer.release.proof import Proof, ProofOutcome, VersionLogprobs, prove

CONTEXTS, TOKENS = 48, 3  # what the publisher asks for
TRIALS = 80
CHANGES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
NOISES = [1e-7, 1e-6, 1e-4, 1e-3, 0.01, 0.03]  # float32 to bfloat16
PLACES = [place for place in range(CONTEXTS) for _ in range(TOKENS)]

Numbers = NDArray[numpy.float64]


@dataclass
class NoisyEngine:
    """An engine and a trainer that compute the same logprobs, each with its own rounding errors."""

    dice: numpy.random.Generator
    change: float  # nats, root of the mean square of what the new version changes
    noise: float  # nats of the engine
    own: float  # nats of the trainer

    def effect(self) -> Numbers:
        """What an adapter changes: more in some contexts than in others, tokens of a context by turns up and down."""
        scale = self.dice.lognormal(0.0, 0.7, CONTEXTS).repeat(TOKENS)
        drawn = scale * self.dice.standard_normal(CONTEXTS * TOKENS)
        return numpy.asarray(drawn / sqrt(float((drawn**2).mean())))

    def rounding(self, size: float) -> Numbers:
        """Half of it is shared by the tokens of a context."""
        each = self.dice.standard_normal(CONTEXTS * TOKENS)
        shared = self.dice.standard_normal(CONTEXTS).repeat(TOKENS)
        return numpy.asarray(size * (each + shared) / sqrt(2.0))

    def proof(self, old: Numbers, new: Numbers, served: Numbers, *, base: Numbers | None = None) -> Proof:
        """All versions as what they change of the base model; `served` answers under the new one's name."""
        always = self.rounding(self.noise)  # what engine and trainer compute differently in every version

        def by_engine(version: Numbers) -> list[float | None]:
            return [float(value) for value in -2.0 + version + always + self.rounding(self.noise)]

        def by_trainer(version: Numbers) -> list[float]:
            return [float(value) for value in -2.0 + version + self.rounding(self.own)]

        known = {"agent@1": VersionLogprobs(by_engine(old), by_trainer(old))}
        if base is not None:
            known["agent@0"] = VersionLogprobs(by_engine(base), by_trainer(base))
        return prove(PLACES, VersionLogprobs(by_engine(served), by_trainer(new)), known, tolerance=0.1)


def outcomes(
    change: float, noise: float, case: Callable[[NoisyEngine], Proof], trials: int = TRIALS, own: float = 1e-7
) -> Counter[ProofOutcome]:
    dice = numpy.random.default_rng([round(1e9 * change), round(1e9 * noise), trials])
    return Counter(case(NoisyEngine(dice, change, noise, own)).outcome for _ in range(trials))


def applied(world: NoisyEngine) -> Proof:
    old = 3 * world.change * world.effect()
    new = old + world.change * world.effect()
    return world.proof(old, new, new, base=numpy.zeros_like(old))


def never_applied(world: NoisyEngine) -> Proof:
    old = 3 * world.change * world.effect()
    return world.proof(old, old + world.change * world.effect(), old, base=numpy.zeros_like(old))


def served_by_the_base(world: NoisyEngine) -> Proof:
    """Also where training comes half of the way back to the base model."""
    step = world.effect()
    old = -2 * world.change * (0.8 * step + 0.6 * world.effect())
    return world.proof(old, old + world.change * step, numpy.zeros_like(old), base=numpy.zeros_like(old))


def first_version_served_by_the_base(world: NoisyEngine) -> Proof:
    nothing = numpy.zeros(CONTEXTS * TOKENS)
    return world.proof(nothing, world.change * world.effect(), nothing)


def another_adapter(world: NoisyEngine) -> Proof:
    """One that was trained for the same: what it changes correlates by a half, and is as large."""
    step = world.effect()
    other = 0.5 * step + sqrt(0.75) * world.effect()
    nothing = numpy.zeros_like(step)
    size = world.dice.uniform(0.5, 2.0)
    return world.proof(nothing, world.change * step, size * world.change * other)


def noise_alone(world: NoisyEngine) -> Proof:
    """The round changed nothing; what moved is the trainer's rounding."""
    nothing = numpy.zeros(CONTEXTS * TOKENS)
    return NoisyEngine(world.dice, 0.0, world.noise, world.change).proof(nothing, nothing, nothing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [never_applied, served_by_the_base, first_version_served_by_the_base, another_adapter, noise_alone],
)
def test_what_is_not_the_new_version_is_never_called_proven(case: Callable[[NoisyEngine], Proof]) -> None:
    """3,360 decisions each: a true rate of 1e-3 would show with a probability of 97%."""
    for change in CHANGES:
        for noise in NOISES:
            found = outcomes(change, noise, case)
            assert found[ProofOutcome.PROVEN] == 0, (case.__name__, change, noise, found)


@pytest.mark.slow
@pytest.mark.parametrize("own", [1e-7, 1e-3])
def test_an_applied_adapter_is_proven_where_it_changes_six_times_what_rounding_does(own: float) -> None:
    for change in CHANGES[1:]:
        for noise in NOISES:
            if 6 * max(noise, own) > change:
                continue
            found = outcomes(change, noise, applied, 50, own)
            assert found[ProofOutcome.PROVEN] == 50, (change, noise, found)


@pytest.mark.slow
def test_rounding_alone_never_rejects_an_applied_adapter() -> None:
    for change in CHANGES:
        for noise in NOISES:
            found = outcomes(change, noise, applied, 40)
            assert found[ProofOutcome.WRONG] == 0, (change, noise, found)


@pytest.mark.parametrize("case", [never_applied, served_by_the_base, first_version_served_by_the_base])
def test_what_is_plainly_not_applied_is_rejected_and_not_waited_for(case: Callable[[NoisyEngine], Proof]) -> None:
    for change in CHANGES[2:]:
        for noise in NOISES:
            if 10 * noise <= change:
                assert outcomes(change, noise, case, 20)[ProofOutcome.WRONG] == 20, (change, noise)


def test_a_change_that_grows_beyond_rounding_is_proven_in_the_end() -> None:
    """Versions pile up on the one in service until the distance is decidable, in bfloat16 too."""
    dice = numpy.random.default_rng(7)
    for noise in (0.003, 0.03):
        world, total, rounds = NoisyEngine(dice, 0.01, noise, 1e-6), numpy.zeros(CONTEXTS * TOKENS), 0
        direction = world.effect()
        while not world.proof(numpy.zeros_like(total), total, total).holds:
            total = total + world.change * direction
            rounds += 1
            assert rounds < 30
        assert 2 * noise < rounds * world.change < 7 * noise


def test_what_cannot_be_compared_is_unproven_and_says_why() -> None:
    new, old = VersionLogprobs([-1.0] * 3, [-1.0] * 3), VersionLogprobs([None] * 3, [-9.0] * 3)
    assert "no probe" in str(prove([], VersionLogprobs([], []), {}, tolerance=0.1).reason)
    found = prove([0, 1, 2], new, {"agent@1": old}, tolerance=0.1)
    assert (found.outcome, found.reason) == (
        ProofOutcome.UNPROVEN,
        "agent@1 gives every probe token too low a probability to compare",
    )
    few = prove([0, 0, 0], new, {"agent@1": VersionLogprobs([-1.1] * 3, [-1.1] * 3)}, tolerance=0.1)
    assert (few.outcome, "too few contexts (1.0)" in str(few.reason)) == (ProofOutcome.UNPROVEN, True)
