"""Costs of rollouts: tokens, seconds, and money if the prices are known. Pure.

Prices come from the user: LiteLLM's `input_cost_per_token` and `output_cost_per_token` of a `model_list` entry (under
`litellm_params` or `model_info`), or `tuner.prices` for models served by vLLM. A judge has its own
`input_cost_per_million` and `output_cost_per_million`. An unknown price is unknown, never zero; if only some prices are
known, the sum is a lower bound and is marked as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ratchet.store.operation_records import Rollout
from ratchet.store.records import JudgeRequest

_NAMES = ("input_cost_per_token", "output_cost_per_token")


class Price(msgspec.Struct, frozen=True):
    """Price of a prompt token and of a completion token."""

    prompt_token: float
    completion_token: float


class Money(msgspec.Struct, frozen=True):
    """An amount; `known` False: a part has no known price, and the amount is a lower bound."""

    amount: float
    known: bool = True

    def __add__(self, other: Money) -> Money:
        return Money(self.amount + other.amount, self.known and other.known)

    def describe(self) -> str:
        """Return for example `0.0123`, `at least 0.0123` or `unknown`."""
        if self.known:
            return f"{self.amount:.4g}"
        return f"at least {self.amount:.4g}" if self.amount else "unknown"


FREE = Money(0.0)
UNKNOWN = Money(0.0, known=False)


class RolloutCost(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts, tokens, time and money spent."""

    rollouts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # summed over rollouts that ran concurrently
    money: Money = FREE

    def __add__(self, other: RolloutCost) -> RolloutCost:
        return RolloutCost(
            rollouts=self.rollouts + other.rollouts,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            seconds=self.seconds + other.seconds,
            money=self.money + other.money,
        )


def judging_cost(exchanges: Iterable[JudgeRequest]) -> RolloutCost:
    """Return the cost of a judge's language-model calls."""
    return sum(
        (
            RolloutCost(
                prompt_tokens=one.prompt_tokens, completion_tokens=one.completion_tokens, seconds=one.latency,
                money=UNKNOWN if one.cost is None else Money(one.cost),
            )
            for one in exchanges
        ),
        RolloutCost(),
    )  # fmt: skip


class Prices:
    """The prices of models by name; every version of an alias costs what the alias costs."""

    def __init__(self, known: Mapping[str, Price]) -> None:
        self._known = dict(known)

    def of(self, model: str) -> Price | None:
        """Return a model's price, or None. `alias@3` has the price of `alias`."""
        return self._known.get(model) or self._known.get(model.partition("@")[0])

    def money(self, model: str, prompt_tokens: int, completion_tokens: int) -> Money:
        price = self.of(model)
        if price is None:
            return UNKNOWN if prompt_tokens or completion_tokens else FREE
        return Money(prompt_tokens * price.prompt_token + completion_tokens * price.completion_token)


def prices_of(model_list: Iterable[Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]] | None = None) -> Prices:
    """Return the prices in the settings; entries with the same name cost the higher price of each token.

    `own`: prices by alias, for models served by vLLM. An entry with only one of the two prices has no known price, and
    neither has a pool with such a member.
    """
    found: dict[str, Price | None] = {}
    for entry in model_list:
        name = str(entry["model_name"])
        price = _price({**(entry.get("model_info") or {}), **_given(entry.get("litellm_params") or {})})
        found[name] = _more_expensive(found[name], price) if name in found else price
    found |= {name: _price(values) for name, values in (own or {}).items()}
    return Prices({name: price for name, price in found.items() if price is not None})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in _NAMES if values.get(name) is not None}


def _price(values: Mapping[str, Any]) -> Price | None:
    try:
        prices = [float(values.get(name, "nan")) for name in _NAMES]  # YAML reads 4e-7 as text
    except (TypeError, ValueError):
        return None
    return Price(*prices) if all(0 <= price < math.inf for price in prices) else None


def _more_expensive(one: Price | None, other: Price | None) -> Price | None:
    if one is None or other is None:
        return None
    return Price(max(one.prompt_token, other.prompt_token), max(one.completion_token, other.completion_token))


def rollout_cost(rollout: Rollout, prices: Prices) -> RolloutCost:
    money = prices.money(rollout.model or rollout.candidate, rollout.prompt_tokens, rollout.completion_tokens)
    return RolloutCost(
        rollouts=1, prompt_tokens=rollout.prompt_tokens, completion_tokens=rollout.completion_tokens,
        seconds=seconds_of(rollout), money=money,
    )  # fmt: skip


def seconds_of(rollout: Rollout) -> float:
    """Return how long a rollout ran."""
    if rollout.started_at is None or rollout.ended_at is None:
        return 0.0
    return max(0.0, rollout.ended_at - rollout.started_at)


def busy_seconds(rollouts: Iterable[Rollout]) -> float:
    """Return the seconds during which at least one rollout ran."""
    total = over = 0.0
    spans = sorted((one.started_at, one.ended_at) for one in rollouts if one.started_at and one.ended_at)
    for began, ended in spans:
        total += max(0.0, ended - max(began, over))
        over = max(over, ended)
    return total
