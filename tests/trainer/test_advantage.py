"""Claims about advantages."""

from __future__ import annotations

import math
import statistics

import pytest

from trainer.advantage import group_advantages, has_signal
from trainer.errors import ScoreError


def test_advantages_are_the_papers_normalised_scores() -> None:
    scores = [0.0, 0.25, 1.0]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    assert group_advantages(scores) == pytest.approx([(s - mean) / (std + 1e-4) for s in scores])


def test_advantages_sum_to_zero_and_keep_the_order_of_the_scores() -> None:
    advantages = group_advantages([0.3, 0.9, 0.1, 0.4])
    assert sum(advantages) == pytest.approx(0.0, abs=1e-12)
    assert sorted(advantages) == [advantages[2], advantages[0], advantages[3], advantages[1]]


def test_without_the_standard_deviation_a_small_spread_stays_small() -> None:
    assert group_advantages([0.5, 0.6], scale_by_std=False) == pytest.approx([-0.05, 0.05])


@pytest.mark.parametrize("scores", [[], [0.7], [0.7, 0.7, 0.7], [0.1 + 0.2, 0.3]])
def test_a_group_without_variance_has_no_signal_and_zero_advantages(scores: list[float]) -> None:
    assert not has_signal(scores)
    assert group_advantages(scores) == (0.0,) * len(scores)


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ScoreError, match="not all finite"):
        group_advantages([0.1, math.nan])
