"""Rewards of single turns: compared over the turns of a group, and earned by the tokens of their own call alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ratchet.store.records import Verdict
from ratchet.store.states import CallState
from ratchet.store.store import Store
from ratchet.trainer.controller.advantages import turn_advantages
from ratchet.trainer.rows.build_rows import build_rows
from tests.harness.trainer.agents import agents_work
from tests.trainer.test_roles import verdicts
from tests.trainer.test_rows import call, choice

if TYPE_CHECKING:
    from tests.harness.trainer.stepped_controller import SteppedController


def verdicts_of(*turns: list[float]) -> list[Verdict]:
    """Verdicts of equal scores, with what was said of each one's turns."""
    return [verdicts([0.5], **{f"turn:{number}": [score] for number, score in enumerate(each, 1)})[0] for each in turns]


def test_turns_are_compared_with_all_turns_of_the_group() -> None:
    found = turn_advantages(verdicts_of([1.0, 0.0], [0.5]), "dr_grpo", 2.0)
    assert found == [{1: pytest.approx(1.0), 2: pytest.approx(-1.0)}, {1: pytest.approx(0.0)}]


@pytest.mark.parametrize(
    ("turns", "weight"),
    [([[1.0], [0.0]], 0.0), ([[1.0], []], 1.0), ([[1.0, 0.0]], 1.0), ([[1.0], [1.0]], 1.0)],
    ids=["no weight", "a member without", "a single", "all the same"],
)
def test_where_nothing_can_be_compared_turns_earn_nothing(turns: list[list[float]], weight: float) -> None:
    assert not any(any(each.values()) for each in turn_advantages(verdicts_of(*turns), "grpo", weight))


def test_a_turns_advantage_reaches_the_tokens_of_its_own_call_in_the_same_row() -> None:
    calls = [
        call("1", (1, 2), choice((3, 4))),
        call("2", (5,), choice((6,)), parent_call="1", context="exact"),
        call("3", (7,), choice((8,)), parent_call="2", context="exact"),
    ]
    (row,) = build_rows("t", calls, 0.5, by_turn={1: 1.0, 3: -2.0}).rows
    assert row.advantages is not None
    assert [a for a, trained in zip(row.advantages, row.mask, strict=True) if trained] == [1.5, 1.5, 0.5, -1.5]
    (plain,) = build_rows("t", calls, 0.5).rows
    assert plain.advantages is None


def test_a_group_of_equal_scores_is_trained_by_its_turns(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    by_turn = [{"score": 0.5, "components": {"turn:1": score}} for score in (0.0, 1.0)]
    agents_work(store, "a", by_turn)
    make_controller(turn_weight=0.5, groups_per_round=1).step(1000.0)
    (held,) = store.rounds.page("agent")
    assert held.metrics["tokens_trained"] == 6
    assert held.metrics["weight_change"] > 0


def test_turns_are_counted_without_failed_and_repeated_calls() -> None:
    calls = [
        call("1", (1, 2), choice((3,)), prompt_node="a"),
        call("failed", (5,), parent_call="1", context="exact", prompt_node="b", state=CallState.FAILED, status=500),
        call("lost", (5,), choice((6,)), parent_call="1", context="exact", prompt_node="b"),
        call("2", (5,), choice((7,)), parent_call="1", context="exact", prompt_node="b", linked_by="retry"),
        call("3", (8,), choice((9,)), parent_call="2", context="exact", prompt_node="c"),
    ]
    (row,) = build_rows("t", calls, 0.0, by_turn={1: 1.0, 2: 2.0, 3: 3.0}).rows
    assert row.advantages is not None
    assert [a for a, trained in zip(row.advantages, row.mask, strict=True) if trained] == [1.0, 2.0, 3.0]
