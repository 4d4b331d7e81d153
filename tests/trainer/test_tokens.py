"""Claims about token rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ratchet.trainer.errors import RowError
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget

ROW = TokenRow("t1", ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.5, -1.5), advantage=1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ids": (5, 6)}, "lengths differ: ids 2, mask 3, logprobs 3"),
        ({"advantages": (1.0,)}, "advantages 1"),
        ({"mask": (0, 0, 0)}, "no token is trained"),
        ({"mask": (1, 1, 1)}, r"mask\[0\] must be 0"),
        ({"mask": (0, 2, 1)}, "other than 0 and 1"),
        ({"ids": (5, -1, 7)}, r"ids\[1\] is negative"),
        ({"logprobs": (0.0, float("nan"), -1.0)}, r"logprobs\[1\] is nan"),
        ({"logprobs": (0.0, -1.0, 0.5)}, r"logprobs\[2\] is 0.5"),
        ({"logprobs": (0.0, -1.0, float("-inf"))}, r"logprobs\[2\] is -inf"),
        ({"advantage": float("inf")}, "advantage is not finite"),
        ({"temperature": 0.0}, "greedy rows"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_with_its_trajectory(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=f"trajectory t1: .*{reason}"):
        replace(ROW, **change)


def test_a_row_has_signal_only_where_a_trained_token_has_an_advantage() -> None:
    assert ROW.has_signal
    assert not replace(ROW, advantage=0.0).has_signal
    assert not replace(ROW, advantages=(3.0, 0.0, 0.0)).has_signal


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = [7, 100, 3, 8, 50, 3, 20]
    batches = split_by_budget(lengths, 40)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[index] for index in batch) <= 40 or len(batch) == 1
