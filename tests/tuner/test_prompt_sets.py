"""The tasks and the budget of a prompt search: no shared content, hard limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.trainer.errors import BudgetExceeded, TaskSetError
from ratchet.trainer.tasks import Task
from ratchet.tuner.prompts.prompt_tuning import divide
from ratchet.tuner.prompts.trials import Budget
from ratchet.tuner.settings import MIN_HELD_OUT_TASKS, MIN_TRAIN_TASKS, MIN_VALIDATION_TASKS, PromptSettings


def named(*ids: int) -> list[Task]:
    return [Task(f"{one:016x}", {}, "train", one) for one in ids]


ids = st.lists(st.integers(0, 60), max_size=60)


@given(tasks=ids, test=ids, validation=ids, seed=st.integers(0, 3))
def test_no_task_is_in_two_sets(tasks: list[int], test: list[int], validation: list[int], seed: int) -> None:
    try:
        sets = divide(
            named(*tasks),
            named(*test),
            PromptSettings(train_tasks=10, validation_tasks=10, held_out_tasks=10),
            seed,
            named(*validation),
        )
    except TaskSetError:
        return
    every = [*sets.train, *sets.validation, *sets.held_out]
    assert len(every) == len(set(every))
    assert MIN_TRAIN_TASKS <= len(sets.train) <= 10
    assert MIN_VALIDATION_TASKS <= len(sets.validation) <= 10
    assert MIN_HELD_OUT_TASKS <= len(sets.held_out) <= 10
    if test:
        assert set(sets.held_out) <= {one.id for one in named(*test)}


def test_twelve_different_tasks_are_enough_and_eleven_are_not() -> None:
    sets = divide(named(*range(12)), [], PromptSettings(), seed=1)
    assert (len(sets.train), len(sets.validation), len(sets.held_out)) == (3, 3, 6)
    with pytest.raises(TaskSetError, match="12 different ones"):
        divide(named(*range(11), *range(11)), [], PromptSettings(), seed=1)


def test_the_whole_test_split_decides_unless_a_number_is_given_so_that_a_report_compares_with_other_methods() -> None:
    test = named(*range(1000, 1250))
    assert divide(named(*range(40)), test, PromptSettings(), seed=1).held_out == tuple(one.id for one in test)
    assert len(divide(named(*range(40)), test, PromptSettings(held_out_tasks=7), seed=1).held_out) == 7


def test_without_a_test_split_no_more_than_a_hundred_tasks_are_set_aside_unasked() -> None:
    assert len(divide(named(*range(1000)), [], PromptSettings(), seed=1).held_out) == 100
    assert len(divide(named(*range(1000)), [], PromptSettings(held_out_tasks=300), seed=1).held_out) == 300


def test_a_task_of_both_splits_is_held_out_alone() -> None:
    sets = divide(named(*range(30)), named(*range(20, 40)), PromptSettings(), seed=1)
    assert not {*sets.train, *sets.validation} & {one.id for one in named(*range(20, 40))}


def test_the_order_of_the_rows_does_not_matter_and_the_seed_does() -> None:
    sets = divide(named(*range(40)), [], PromptSettings(), seed=1)
    assert sets == divide(named(*reversed(range(40))), [], PromptSettings(), seed=1)
    assert sets != divide(named(*range(40)), [], PromptSettings(), seed=2)


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
