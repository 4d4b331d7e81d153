"""A model is chosen only where it is shown; crashes, ties, unjudged attempts and unknown prices are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ratchet.store.operation_records import Rollout
from ratchet.store.states import RolloutState
from ratchet.tuner.rollouts.prices import Money, Price, Prices
from ratchet.tuner.selection import Selection, select

PRICES = Prices({"large": Price(10e-6, 10e-6), "small": Price(1e-6, 1e-6)})
NONE = Prices({})


def rollouts(candidate: str, scores: Sequence[float | str | None], **changes: Any) -> list[Rollout]:
    """One attempt at each of several tasks: a score, None where the judge failed, or text of the exception."""
    made = []
    for number, score in enumerate(scores):
        failed = isinstance(score, str)
        values: dict[str, Any] = {
            "id": f"{candidate}{number}", "tuning_id": "tun", "task_id": f"task{number}", "split": "test", "attempt": 0,
            "candidate": candidate, "model": candidate, "planned_at": 0.0, "started_at": 1.0, "ended_at": 2.0 + number,
            "state": RolloutState.FAILED if failed else RolloutState.ENDED, "failure": score if failed else None,
            "score": None if failed else score, "judge_failure": "is down" if score is None else None,
            "prompt_tokens": 90, "completion_tokens": 10,
        }  # fmt: skip
        made.append(Rollout(**(values | changes)))
    return made


def chosen(*given: list[Rollout], prices: Prices = PRICES, **policy: Any) -> Selection:
    every = [one for own in given for one in own]
    return select(every, list(dict.fromkeys(one.candidate for one in every)), prices, **policy)


def test_the_better_model_is_chosen_by_what_its_rollouts_show() -> None:
    found = chosen(rollouts("small", [0.0, 1.0] * 10), rollouts("large", [1.0] * 20))
    assert found.chosen == "large"
    assert [one.candidate for one in found.figures] == ["large", "small"]


def test_a_candidate_that_always_crashes_is_last_and_says_why_most_often() -> None:
    crash = rollouts("large", ["ConnectError: refused"] * 7 + ["TimeoutError: 5 s"])
    found = chosen(crash, rollouts("small", [0.0, -1.0] * 4))
    assert [(one.candidate, one.mean, one.failed) for one in found.ranking.scores] == [
        ("small", -0.5, 0), ("large", -1.0, 8),
    ]  # fmt: skip
    assert found.figures[1].commonest_failure == "ConnectError: refused (7 of 8)"
    assert found.figures[1].seconds_p50 is None


def test_one_right_of_six_with_five_crashes_does_not_beat_five_of_six() -> None:
    crashing: list[float | str | None] = [1.0, *["boom"] * 5]
    found = chosen(rollouts("large", crashing), rollouts("small", [1.0] * 5 + [0.0]))
    assert [one.candidate for one in found.ranking.scores] == ["small", "large"]


def test_a_tie_chooses_nobody_and_says_so() -> None:
    found = chosen(rollouts("large", [0.0, 1.0, 1.0] * 5), rollouts("small", [1.0, 0.0, 1.0] * 5))
    assert found.chosen is None
    assert "large and small are tied" in found.reason


def test_no_tie_is_reported_if_no_rollout_ended() -> None:
    found = chosen(rollouts("large", ["boom"] * 8), rollouts("small", ["boom"] * 8))
    assert (found.chosen, found.reason) == (None, "no rollout of any candidate finished")


def test_a_run_has_measured_something_where_one_rollout_ended_and_was_judged() -> None:
    failed, unjudged = rollouts("large", ["boom"] * 6), rollouts("small", [None] * 6)
    assert not chosen(failed, unjudged).measured
    assert chosen(failed, rollouts("small", [None] * 5 + [0.0])).measured


def test_a_judge_that_fails_where_it_matters_chooses_nobody_and_says_so() -> None:
    judged: list[float | str | None] = [1.0] * 8 + [None] * 12
    found = chosen(rollouts("large", judged), rollouts("small", [0.2] * 20))
    assert found.chosen is None
    assert "ranking: large has 12 unjudged" in found.reason
    assert found.figures[0].commonest_judge_failure == "is down (12 of 12)"


def test_the_cheapest_within_the_margin_is_chosen() -> None:
    alike = [rollouts("large", [1.0] * 100), rollouts("small", [1.0] * 98 + [0.0] * 2)]
    found = chosen(*alike, policy="cheapest", within=0.1)
    assert found.chosen == "small"
    assert found.figures[1].cost_per_rollout == pytest.approx(1e-4)
    assert chosen(*alike, policy="cheapest", within=0.001).chosen is None


def test_cheap_and_bad_is_not_chosen() -> None:
    found = chosen(rollouts("large", [1.0] * 30), rollouts("small", [0.5] * 30), policy="cheapest", within=0.1)
    assert found.chosen == "large"


def test_few_tasks_do_not_show_that_two_are_alike() -> None:
    found = chosen(rollouts("large", [1.0] * 4), rollouts("small", [1.0] * 4), policy="cheapest", within=0.05)
    assert found.chosen is None
    assert "more tasks" in found.reason


def test_nothing_is_called_cheapest_beside_a_price_that_is_unknown() -> None:
    alike = [rollouts("large", [1.0] * 100), rollouts("mine", [1.0] * 100)]
    found = chosen(*alike, policy="cheapest", within=0.1)
    assert (found.chosen, "price of mine is unknown" in found.reason) == (None, True)
    assert found.figures[1].spent.money == Money(0.0, known=False)


def test_cost_time_and_tokens_are_those_of_all_rollouts() -> None:
    found = chosen(rollouts("small", [*[1.0] * 18, "boom", None])).figures[0]
    assert (found.spent.rollouts, found.spent.prompt_tokens, found.spent.completion_tokens) == (20, 1800, 200)
    assert found.spent.money.amount == pytest.approx(20 * 100 * 1e-6)
    assert (found.ended, found.seconds_p50, found.seconds_p95) == (19, 10.0, 20.0)


def test_what_is_only_planned_is_unjudged_and_costs_nothing() -> None:
    planned = rollouts(
        "small", [None] * 3, state=RolloutState.PLANNED, ended_at=None, prompt_tokens=0, completion_tokens=0
    )
    found = chosen(planned, rollouts("large", [1.0] * 3))
    assert found.ranking.pair("large", "small").unjudged == 3
    assert found.figures[1].spent.rollouts == 0
