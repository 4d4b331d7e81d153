"""The sign-flip test is exact for few differences and keeps its error rate; Holm's correction keeps the order."""

from __future__ import annotations

import random
import statistics
import sys

import pytest

from ratchet.trainer.errors import TuningError
from ratchet.trainer.statistics import holm, sign_flip_p


def no_gain(chance: random.Random) -> float:
    """The difference of two equal agents on a task of any difficulty, four attempts each."""
    easy = chance.uniform(0.1, 0.8)
    return statistics.fmean((chance.random() < easy) - (chance.random() < easy) for _ in range(4))


def test_one_difference_is_no_evidence() -> None:
    assert sign_flip_p([1.0]) == 1.0


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    with pytest.raises(TuningError, match=r"needs scipy.*\[trainer\]"):
        sign_flip_p([1.0, 0.5])


def test_few_differences_are_tested_exactly() -> None:
    assert sign_flip_p([0.5] * 5) == 2 / 2**5
    assert sign_flip_p([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]) == 2 / 2**6
    assert sign_flip_p([1.0, -1.0, 0.0]) == 1.0
    assert sign_flip_p([]) == 1.0


def test_a_drawn_p_value_is_that_of_the_exact_test() -> None:
    gains = [0.5, -0.3, 0.8, 0.1, -0.2, 0.4, 0.6, -0.1, 0.3, 0.2, 0.05, -0.4, 0.7]
    more = [*gains, 1e-9]  # one more difference, too small to matter: scipy samples signs
    assert sign_flip_p(more) == pytest.approx(sign_flip_p(gains), abs=0.015)
    assert sign_flip_p([0.5] * 40) == 2 / 10_000  # twice the smaller tail


def test_equal_agents_differ_significantly_in_about_one_of_twenty_comparisons() -> None:
    chance = random.Random(3)
    shown = sum(sign_flip_p([no_gain(chance) for _ in range(12)]) < 0.05 for _ in range(300))
    assert shown <= 0.08 * 300


def test_holm_corrects_the_smallest_most_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
