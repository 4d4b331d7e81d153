"""Token rows: what the learner trains on, and the roles that are trained."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ratchet.store.records import Call
from ratchet.trainer.errors import RowError

# Roles: the parts of a multi-agent system, and which of them are trained. Pure.
#
# The role of a call is the one in its `x-ratchet-role` header, else the first one whose pattern matches its system
# prompt, else none. If roles are configured, only their calls carry loss.

UNTRAINED_ROLE = "other_role"  # reason for untrained tokens
_MAX_PROMPT_CHARS = 4000  # of a system prompt that patterns are matched against


@dataclass(frozen=True, slots=True)
class Roles:
    """The trained roles (empty: all), and the system-prompt patterns by role."""

    train: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)

    def trains(self, role: str | None) -> bool:
        return not self.train or role in self.train

    def named(self, calls: Sequence[Call], system_prompt: Callable[[str], str]) -> tuple[Call, ...]:
        """Return the calls with their roles; `system_prompt` returns the system prompt of a prompt node."""
        if not self.prompts:
            return tuple(calls)
        return tuple(
            call
            if call.role
            else msgspec.structs.replace(call, role=self._role_by_prompt(system_prompt(call.prompt_node)))
            for call in calls
        )

    def _role_by_prompt(self, prompt: str) -> str | None:
        text = prompt[:_MAX_PROMPT_CHARS]
        return next((role for role, pattern in self.prompts.items() if re.search(pattern, text)), None)


# Token rows: the learner's training data.
#
# A row is one token sequence of length T as vLLM processed it: ids, a mask of the sampled ones, their logprobs, and
# their advantage. A trajectory with a forked context has several rows. Rows are validated at creation.

# Rounding can make a logprob slightly positive (+1e-7). Larger values are invalid.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training sequence of T tokens.

    ids          (T,) token ids as sampled or rendered by vLLM, never re-tokenized text
    mask         (T,) 1: sampled by vLLM and carries loss, 0: context; the first token is always context
    logprobs     (T,) sampling logprob of the token, after temperature; ignored if mask is 0
    advantage    of all trained tokens of the row, unless `advantages` (T,) gives one per token
    temperature  of the sampling; the learner divides its logits by it
    truncation   top_k (0: all), top_p and min_p of the sampling: the logprobs are normalised over the tokens that they
                 leave; None: over all
    importance   False if sampled with penalties or a bias: the logprobs belong to a distribution that the learner does
                 not compute, so there is no importance ratio
    age          versions trained since the one that sampled the row, if known
    group        id of the group that the trajectory is compared within; only preference losses use it

    Raises RowError with the trajectory's id if the row is inconsistent.
    """

    trajectory_id: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    temperature: float = 1.0
    advantages: tuple[float, ...] | None = None
    importance: bool = True
    group: str = ""
    age: int | None = None
    truncation: tuple[int, float, float] | None = None

    def __post_init__(self) -> None:
        problem = self._shape_problem() or self._value_problem()
        if problem:
            raise RowError(f"row of trajectory {self.trajectory_id}: {problem}")

    @property
    def tokens_trained(self) -> int:
        return sum(self.mask)

    @property
    def has_signal(self) -> bool:
        """Return whether a trained token has an advantage other than 0."""
        if self.advantages is None:
            return self.advantage != 0.0
        return any(a != 0.0 for a, m in zip(self.advantages, self.mask, strict=True) if m)

    def _shape_problem(self) -> str | None:
        lengths = {"ids": len(self.ids), "mask": len(self.mask), "logprobs": len(self.logprobs)}
        if self.advantages is not None:
            lengths["advantages"] = len(self.advantages)
        if len(set(lengths.values())) > 1:
            return "lengths differ: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
        if not set(self.mask) <= {0, 1}:
            return "mask has values other than 0 and 1"
        if not any(self.mask):
            return "no token is trained: mask has no 1"
        if self.mask[0] != 0:
            return "mask[0] must be 0: nothing precedes the first token, so no model can score it"
        return None

    def _value_problem(self) -> str | None:
        if min(self.ids) < 0:
            return f"ids[{self.ids.index(min(self.ids))}] is negative"
        for place, (logprob, trained) in enumerate(zip(self.logprobs, self.mask, strict=True)):
            if trained and not -math.inf < logprob <= LOGPROB_TOLERANCE:
                return f"logprobs[{place}] is {logprob}, not a finite logprob at or below 0"
        advantages = (self.advantage, *(self.advantages or ()))
        if not all(map(math.isfinite, advantages)):
            return "an advantage is not finite"
        if not 0.0 < self.temperature < math.inf:
            return f"temperature is {self.temperature}; greedy rows carry no exploration and are not RL data"
        if self.truncation is not None:
            top_k, top_p, min_p = self.truncation
            if top_k < 0 or not 0.0 < top_p <= 1.0 or not 0.0 <= min_p <= 1.0:
                return f"truncation is {self.truncation}, not top_k of at least 0, top_p and min_p of at most 1"
        return None


def scored_row(ids: tuple[int, ...], mask: tuple[int, ...] | None = None) -> TokenRow:
    """Return a row for a learner's `score`, which scores the tokens of the mask; without one, the last token."""
    return TokenRow("", ids, mask or (*(0,) * (len(ids) - 1), 1), (0.0,) * len(ids), advantage=0.0)


def split_by_budget(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return sequence indices grouped into micro-batches of at most `token_budget` padded tokens.

    They are sorted by length to reduce padding. A sequence longer than the budget is a micro-batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Sorted by length: the others are padded to the last one.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# Selects the contexts that the proof of a swap compares: before sampled tokens, spread over trajectories. Pure.
#
# Rows are taken in an order that spreads over the round, and each gives a few contexts that are far apart: the deepest
# one's cost covers the others, because vLLM's prefix cache and the learner's shared prefixes compute a prefix once. No
# context occurs twice, because rollouts of a task share prefixes. If sampled places are few, places of the prompts fill
# the number.

ROWS = 12  # that suffice
_CONTEXTS = 24
_MAX_TOKENS = 32_768  # of the deepest contexts of all rows together


def contexts(rows: Sequence[TokenRow]) -> list[tuple[int, ...]]:
    """Return the ids before the compared tokens: of many rows a few each, of few long ones more."""
    lengths = sum(len(row.ids) for row in rows)
    affordable = max(1, min(len(rows), _CONTEXTS, _MAX_TOKENS * len(rows) // max(1, lengths)))
    selected: dict[tuple[int, ...], None] = {}
    left = _MAX_TOKENS
    for sampled in (True, False):
        for row in _spread(rows):
            places = [place for place in range(1, len(row.ids)) if row.mask[place] or not sampled]
            wanted = -(-_CONTEXTS // affordable) if sampled else _CONTEXTS - len(selected)
            fresh = [context for place in _even(places, wanted) if (context := row.ids[:place]) not in selected]
            fresh = [context for context in fresh if len(context) <= left][: _CONTEXTS - len(selected)]
            left -= max(map(len, fresh), default=0)
            selected |= dict.fromkeys(fresh)
    return list(selected)


def _spread(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows so that any first part of them is spread over all."""
    order: dict[int, None] = {}
    step = max(1, len(rows))
    while len(order) < len(rows):
        order |= dict.fromkeys(range(0, len(rows), step))
        step = max(1, step // 2)
    return [rows[index] for index in order]


def _even(places: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the places, evenly spread."""
    return [places[len(places) * part // most] for part in range(most)] if len(places) > most else list(places)
