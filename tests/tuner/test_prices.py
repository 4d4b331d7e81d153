"""A price comes from the user or is unknown; partly known costs are marked as lower bounds."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.store.records import JudgeRequest
from ratchet.tuner.rollouts.prices import FREE, UNKNOWN, Money, RolloutCost, judging_cost, prices_of

PRICED = {"input_cost_per_token": 2e-6, "output_cost_per_token": 8e-6}
AS_TEXT = {name: str(price) for name, price in PRICED.items()}  # as YAML reads 2e-6
ONE = "input_cost_per_token"


def entry(name: str, params: dict[str, Any] | None = None, info: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": "openai/x", **(params or {})}, "model_info": info or {}}


@pytest.mark.parametrize(
    "where",
    [
        entry("large", params=PRICED),
        entry("large", info=PRICED),
        entry("large", info=AS_TEXT),
    ],
)
def test_a_price_is_read_where_litellm_has_it(where: dict[str, Any]) -> None:
    assert prices_of([where]).money("large", 1000, 100) == Money(0.0028)


def test_the_parameters_win_over_the_notes() -> None:
    prices = prices_of([entry("large", {"input_cost_per_token": 1e-6}, PRICED)])
    assert prices.money("large", 1_000_000, 0).amount == pytest.approx(1.0)


def test_every_version_of_an_alias_costs_what_the_alias_costs() -> None:
    prices = prices_of([], {"policy": PRICED})
    assert prices.of("policy@3") == prices.of("policy") is not None


@pytest.mark.parametrize(
    "broken",
    [{}, {ONE: 1e-6}, PRICED | {ONE: "cheap"}, PRICED | {ONE: -1}, PRICED | {ONE: "inf"}, PRICED | {ONE: []}],
)
def test_half_a_price_is_no_price(broken: dict[str, Any]) -> None:
    assert prices_of([entry("odd", info=broken)]).of("odd") is None


def test_a_pool_costs_its_dearest_member_and_is_unknown_where_one_is() -> None:
    dear = {"input_cost_per_token": 5e-6, "output_cost_per_token": 1e-6}
    price = prices_of([entry("pool", PRICED), entry("pool", dear)]).of("pool")
    assert price is not None
    assert (price.prompt_token, price.completion_token) == (5e-6, 8e-6)
    assert prices_of([entry("pool", PRICED), entry("pool"), entry("pool", PRICED)]).of("pool") is None


def test_an_unknown_price_is_unknown_and_a_partly_known_one_a_lower_bound() -> None:
    prices = prices_of([entry("large", PRICED)])
    assert prices.money("nobody", 10, 10) == UNKNOWN
    assert UNKNOWN.describe() == "unknown"
    mixed = prices.money("large", 1000, 0) + UNKNOWN
    assert (mixed.known, mixed.describe()) == (False, "at least 0.002")
    assert prices.money("nobody", 0, 0) == FREE
    assert prices.money("large", 1000, 0).describe() == "0.002"


def test_what_was_spent_adds_up() -> None:
    one = RolloutCost(rollouts=1, prompt_tokens=10, completion_tokens=2, seconds=0.5, money=Money(0.1))
    assert one + one == RolloutCost(rollouts=2, prompt_tokens=20, completion_tokens=4, seconds=1.0, money=Money(0.2))
    assert not (one + RolloutCost(money=UNKNOWN)).money.known


@pytest.mark.parametrize(("costs", "money"), [((0.1, 0.2), Money(0.3)), ((0.1, None), Money(0.1, known=False))])
def test_model_requests_of_a_judge_count_as_cost(costs: tuple[float | None, ...], money: Money) -> None:
    requests = [
        JudgeRequest(
            id="x", group_id=None, judge="ruler", url="u", request=b"{}", response=b"", status=200, error=None,
            prompt_tokens=100, completion_tokens=10, cost=cost, latency=0.5, requested_at=1.0,
        )
        for cost in costs
    ]  # fmt: skip
    spent = judging_cost(requests)
    assert (spent.rollouts, spent.prompt_tokens, spent.completion_tokens, spent.seconds) == (0, 200, 20, 1.0)
    assert spent.money.amount == pytest.approx(money.amount)
    assert spent.money.known is money.known
