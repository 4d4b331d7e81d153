"""The gate: looking often is sound, worse versions go back, too-good ones wait for a person."""

from __future__ import annotations

import random

import pytest

from ratchet.trainer.release.decision import ReleaseAction, decide
from ratchet.trainer.settings.release_settings import ReleaseRules
from ratchet.trainer.statistics.sequential_test import boundary, difference


def stream(rate: float, count: int, seed: int) -> list[float]:
    randomness = random.Random(seed)
    return [float(randomness.random() < rate) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_a_version_that_is_no_worse_is_rarely_rolled_back_however_often_one_looks(rate: float) -> None:
    rollbacks = 0
    for trial in range(200):
        live, canary = stream(rate, 600, 2 * trial), stream(rate, 300, 2 * trial + 1)
        rollbacks += any(difference(canary[:n], live[: 2 * n], 0.05).high < 0 for n in range(20, 301, 4))
    assert rollbacks <= 10  # 5% of 200


def test_a_worse_version_is_rolled_back_and_a_better_one_promoted() -> None:
    rules = ReleaseRules(margin=0.05)
    worse = decide(stream(0.3, 200, 1), stream(0.7, 800, 2), rules)
    better = decide(stream(0.8, 200, 3), stream(0.5, 800, 4), rules)
    assert (worse.action, better.action) == (ReleaseAction.ROLLBACK, ReleaseAction.PROMOTE)
    assert worse.difference is not None
    assert worse.difference.high < 0
    assert worse.evidence()["release"]["difference"]["new_count"] == 200


def test_too_little_evidence_waits() -> None:
    assert decide([1.0] * 5, [0.0] * 500, ReleaseRules()).action is ReleaseAction.WAIT
    assert decide(stream(0.5, 30, 1), stream(0.5, 100, 2), ReleaseRules()).action is ReleaseAction.WAIT


def test_equal_scores_prove_little() -> None:
    assert decide([1.0] * 20, [1.0] * 20, ReleaseRules(margin=0.02)).action is ReleaseAction.WAIT


def test_no_harm_in_many_scores_is_enough_in_the_end() -> None:
    rules = ReleaseRules(margin=0.02, max_samples=400)
    assert decide(stream(0.6, 399, 5), stream(0.58, 2000, 6), rules).action is ReleaseAction.WAIT
    assert decide(stream(0.6, 400, 5), stream(0.58, 2000, 6), rules).action is ReleaseAction.PROMOTE


def test_not_shown_to_be_as_good_in_many_scores_goes_back() -> None:
    assert (
        decide(stream(0.45, 100, 7), stream(0.55, 1000, 8), ReleaseRules(max_samples=100)).action
        is ReleaseAction.ROLLBACK
    )


def test_a_jump_that_is_too_good_is_held_for_a_person() -> None:
    decision = decide(stream(0.95, 300, 9), stream(0.3, 1000, 10), ReleaseRules(max_gain=0.4))
    assert decision.action is ReleaseAction.HOLD
    assert "exceeds max_gain" in decision.reason


def test_the_boundary_shrinks_with_evidence_and_is_wider_than_one_look() -> None:
    assert boundary(400, 0.05) < boundary(100, 0.05) < boundary(25, 0.05)
    assert boundary(100, 0.05) > 1.96 / 10
