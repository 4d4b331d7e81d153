"""General chat data: what keeps the policy able to do everything else while it imitates. Pure, but for reading the set.

A fixed part is held out and only measured: the mean loss of its answers before and after is what "general ability"
means here. Which conversations are held out follows from their content alone, so that two warm starts compare.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Any, Protocol

from ratchet.trainer.errors import RowError, WarmStartRefused
from ratchet.trainer.rows.chat_rows import ChatRows, Conversation
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings


class Scorer(Protocol):
    """What measures: a learner."""

    def score(self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool = True) -> list[tuple[float, ...]]: ...


@dataclass(frozen=True, slots=True)
class GeneralDataRows:
    """Rows to learn from, rows that are only measured, and conversations that were left out, by reason."""

    learnt: tuple[TokenRow, ...] = ()
    held_out: tuple[TokenRow, ...] = ()
    left_out: Mapping[str, int] | None = None


def general_rows(
    told: Iterable[tuple[str, Mapping[str, Any]]], chat: ChatRows, settings: WarmStartSettings
) -> GeneralDataRows:
    """Return the rows of (id, row of a task set with `messages`). Raises WarmStartRefused where nothing is left."""
    left_out: Counter[str] = Counter()
    rendered: dict[str, list[TokenRow]] = {}
    for name, row in told:
        try:
            rendered[name] = chat.rows(_conversation(name, row))
        except RowError as refused:
            left_out[str(refused)] += 1
    order = sorted(rendered, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    aside = min(settings.general_held_out, len(order) // 2)
    if not aside:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.most_common(3)) or "it is empty"
        raise WarmStartRefused(f"general data {settings.general}: no conversations to mix in and measure ({reasons})")
    parts = order[aside:], order[:aside]
    learnt, held_out = (tuple(row for name in part for row in rendered[name]) for part in parts)
    return GeneralDataRows(learnt, held_out, dict(left_out))


def mixed(good: Sequence[TokenRow], general: Sequence[TokenRow], share: float, seed: int) -> list[TokenRow]:
    """Return the good rows and general ones, drawn by the seed, until those are `share` of all or there are no more."""
    wanted = min(len(general), round(len(good) * share / (1 - share)))
    return [*good, *random.Random(seed).sample(list(general), wanted)]


def mean_loss(scorer: Scorer, rows: Sequence[TokenRow]) -> float:
    """Return the mean of -log p over the answers' tokens, in nats."""
    scored = scorer.score(rows)
    return fmean(
        -logprob
        for row, logprobs in zip(rows, scored, strict=True)
        for logprob, carries in zip(logprobs, row.mask, strict=True)
        if carries
    )


def _conversation(name: str, row: Mapping[str, Any]) -> Conversation:
    messages, tools = (_parsed(row.get(column)) for column in ("messages", "tools"))
    if messages is None:
        raise RowError("a row without `messages`")
    return Conversation.of_messages(name, messages, tools)


def _parsed(value: Any) -> Any:
    """Return a column as it is, or what its JSON text says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError("a column that is neither a list nor JSON") from error
