"""A quick linking campaign: every kind of adversarial traffic through one proxy."""

from __future__ import annotations

import pytest

from tests.harness.linking.campaign import measure
from tests.harness.linking.score import StoredCall, TrueCall, score_kinds


@pytest.mark.slow
def test_adversarial_traffic_is_linked_without_ids() -> None:
    results = measure(quick=True)
    assert len(results) > 30
    assert not [one.score for one in results if not one.good]


def test_the_score_detects_merged_and_split_trajectories() -> None:
    truths = [TrueCall(f"{run}{turn}", "kind", run, None, 0, "same", turn) for run in "ab" for turn in range(2)]
    for places, precision, recall in (("ttuu", 1, 1), ("tttt", 1 / 3, 1), ("tuvw", 1, 0), ("tuut", 1, 1)):
        stored = {t.label: StoredCall(place, None, 0, "root") for t, place in zip(truths, places, strict=True)}
        (score,) = score_kinds(truths, stored, alike=["kind"])
        assert (score.precision, score.recall) == (precision, recall)
    (strict,) = score_kinds(truths, {t.label: StoredCall(p, None, 0, "") for t, p in zip(truths, "tuut", strict=True)})
    assert (strict.precision, strict.recall) == (0, 0)
