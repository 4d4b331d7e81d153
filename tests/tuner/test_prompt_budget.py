"""The budget of a prompt tuning is hard, in rollouts and in tokens, and keeps back what the comparison needs."""

from __future__ import annotations

import pytest

from ratchet.trainer.errors import BudgetExceeded
from ratchet.tuner.prompts.trials import Budget


def test_no_rollout_starts_beyond_the_limit_and_a_set_never_starts_in_part() -> None:
    budget = Budget(10, reserved_rollouts=4)
    assert budget.allow(6) == 6
    with pytest.raises(BudgetExceeded, match="--max-rollouts"):
        budget.allow(7)
    for _ in range(6):
        budget.record_rollout(10)
    with pytest.raises(BudgetExceeded):
        budget.allow(1)
    assert budget.allow(4, held_out=True) == 4


def test_of_the_tokens_only_what_is_larger_than_all_before_can_go_over() -> None:
    budget = Budget(1000, tokens=1000)
    assert budget.allow(50) == 1  # how large one is, nobody knows yet
    budget.record_rollout(100)
    while budget.tokens_spent < 1000:
        for _ in range(budget.allow(50)):
            budget.record_rollout(100)
    assert budget.started_rollouts == 10
    with pytest.raises(BudgetExceeded, match="--max-total-tokens 1000"):
        budget.allow(50)


def test_tokens_for_the_comparison_are_kept_back() -> None:
    budget = Budget(1000, tokens=1000, reserved_rollouts=4)
    budget.record_rollout(100)
    assert budget.allow(50) == 5
    assert budget.allow(50, held_out=True) == 8  # of the nine that are affordable, at most the concurrency


def test_reflections_count_and_are_refused_before_the_request() -> None:
    budget = Budget(1000, tokens=1000)
    budget.allow_reflection(2000)
    budget.record_reflection(900, 0.5)
    assert budget.tokens_spent == 900
    with pytest.raises(BudgetExceeded):
        budget.allow_reflection(10)  # as the last one was
    with pytest.raises(BudgetExceeded):
        Budget(1000, tokens=100).allow_reflection(10_000)


def test_an_unknown_price_makes_the_sum_unknown() -> None:
    budget = Budget(10)
    budget.record_reflection(1, 0.25)
    assert budget.cost == 0.25
    budget.record_reflection(1, None)
    budget.record_reflection(1, 0.25)
    assert budget.cost is None
