"""General chat data: preserves the policy's other abilities during a warm start. Pure.

A fixed part is held out and only measured: the mean loss of its answers before and after the warm start measures
general ability. Only the content decides which conversations are held out, so that warm starts are comparable.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Any

from ratchet.trainer.errors import RowError, WarmStartRefused
from ratchet.trainer.learner_api.protocol import LearnerProtocol
from ratchet.trainer.rows.chat_rows import ChatRenderer, Conversation
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings


@dataclass(frozen=True, slots=True)
class GeneralDataRows:
    """Rows to train on, rows that are only measured, and the counts of skipped conversations by reason."""

    trained: tuple[TokenRow, ...] = ()
    held_out: tuple[TokenRow, ...] = ()
    skipped: Mapping[str, int] | None = None


def general_rows(
    conversations: Iterable[tuple[str, Mapping[str, Any]]], chat: ChatRenderer, settings: WarmStartSettings
) -> GeneralDataRows:
    """Return the rows of conversations, given as (id, task row with `messages`). Raises WarmStartRefused if none is
    left.
    """
    skipped: Counter[str] = Counter()
    rendered: dict[str, list[TokenRow]] = {}
    for name, row in conversations:
        try:
            rendered[name] = chat.rows(_conversation(name, row))
        except RowError as refused:
            skipped[str(refused)] += 1
    order = sorted(rendered, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    measured = min(settings.general_held_out, len(order) // 2)
    if not measured:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.most_common(3)) or "it is empty"
        raise WarmStartRefused(f"general data {settings.general}: no conversations to mix in and measure ({reasons})")
    parts = order[measured:], order[:measured]
    trained, held_out = (tuple(row for name in part for row in rendered[name]) for part in parts)
    return GeneralDataRows(trained, held_out, dict(skipped))


def mix_rows(examples: Sequence[TokenRow], general: Sequence[TokenRow], ratio: float, seed: int) -> list[TokenRow]:
    """Return the examples and a random sample of general rows, so that these are `ratio` of all, or as many as
    exist.
    """
    wanted = min(len(general), round(len(examples) * ratio / (1 - ratio)))
    return [*examples, *random.Random(seed).sample(list(general), wanted)]


def mean_loss(learner: LearnerProtocol, rows: Sequence[TokenRow]) -> float:
    """Return the mean of -log p over the answers' tokens, in nats."""
    scored = learner.score(rows)
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
    """Return a column, parsed if it is a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError("a column that is neither a list nor JSON") from error
