"""Claims about whitening."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratchet.trainer.learner.policy_loss import whiten
from tests.harness.trainer.tiny import build_rows


def test_every_trained_token_counts_once_in_mean_and_variance() -> None:
    rows = [*build_rows(5)]
    rows[1] = replace(rows[1], advantages=tuple(float(place) for place in range(len(rows[1].ids))))
    white = whiten(rows)
    each = [
        advantage
        for row in white
        for advantage, trained in zip(row.advantages or (row.advantage,) * len(row.ids), row.mask, strict=True)
        if trained
    ]
    assert sum(each) / len(each) == pytest.approx(0.0, abs=1e-9)
    assert sum(value * value for value in each) / len(each) == pytest.approx(1.0)
    assert [row.ids for row in white] == [row.ids for row in rows]


def test_a_round_of_equal_advantages_becomes_zeros() -> None:
    rows = [replace(row, advantage=0.7 + 1e-9 * place) for place, row in enumerate(build_rows(3))]
    assert [row.advantage for row in whiten(rows)] == pytest.approx([0.0] * 3, abs=1e-12)
    assert not any(row.has_signal for row in whiten([replace(row, advantage=0.5) for row in rows]))
