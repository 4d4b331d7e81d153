"""The pause between two queries for all agents."""

from __future__ import annotations

import pytest

from ratchet.trainer.controller_service.look_pacing import LookPacing


def test_a_single_slow_query_makes_no_pause_longer() -> None:
    pacing = LookPacing(0.5)
    assert [pacing.pause_after(seconds) for seconds in (0.8, 0.001, 0.001, 0.8, 0.8, 0.001)] == [0.5] * 6


def test_queries_that_are_always_slow_take_two_percent_of_the_time() -> None:
    pacing = LookPacing(0.5)
    pauses = [pacing.pause_after(0.2) for _ in range(10)]
    assert pauses[-1] == pytest.approx(10.0)
    assert pauses[:2] == [0.5, 0.5]
