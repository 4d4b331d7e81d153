"""Rows: the token sequences that a trajectory gives to the learner.

A trajectory whose calls are token-exact continuations of each other is one row, however many calls it took. Where the
context forked, where a segment or a branch begins, and where roles earned apart, a further row begins. Promises: every
trained token is one that the engine sampled in an answered call of this trajectory, and it is trained in exactly one
row; whatever is left out is counted with its reason. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ratchet.store.records import TOOL_GRAMMAR, Call, Choice, unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from ratchet.trainer.rows.roles import UNTRAINED_ROLE, Roles
from ratchet.trainer.rows.token_row import TokenRow

_Key = tuple[str, int]  # call id, choice index

# Sampling parameters that bend the distribution, with the values that leave it alone.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (None, 0),
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
}

# What masks tokens before they are sampled: the logprobs then belong to what was left, and forced tokens teach nothing.
_CONSTRAINTS = (
    "allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "structured_outputs",
)  # fmt: skip
ALL_ROLES = Roles()
TRUNCATED = "truncated"  # why tokens are left out
_ANSWER_LOST = "answer_lost"
_CUT_AT_LONGEST = "length"  # the finish reason of an answer that met max_tokens or the model's context
_REPEATS = ("retry", "resend")  # links of calls that were made because nobody had the answer to the one before
_GREEDY_BELOW = 0.01  # vLLM raises temperatures between 0 and this to it


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a trajectory and the sampled tokens that are in none of them, by reason."""

    rows: tuple[TokenRow, ...]
    untrained: Mapping[str, int]


def build_rows(
    trajectory_id: str,
    calls: Sequence[Call],
    advantage: float,
    roles: Roles = ALL_ROLES,
    by_role: Mapping[str, float] = MappingProxyType({}),
    *,
    imitated: bool = False,
    by_turn: Mapping[int, float] = MappingProxyType({}),
    mask_truncated: bool = False,
) -> Rows:
    """Return the rows of a trajectory, all with the same advantage but those of the roles that `by_role` names.

    `by_turn` comes on top of it, for the tokens of the trajectory's own turns by their number, from 1: calls whose
    answer the agent got, since a judge reads no others. With `mask_truncated` answers that were cut off at their
    longest carry no loss.

    `calls` are the trajectory's own and those of earlier trajectories that it continues, in the order in which they
    began; only its own carry loss. Rows that are `imitated` may have been sampled greedily or under constraints: what
    a ratio of probabilities could not stand does not matter where there is none.
    """
    untrained: Counter[str] = Counter()
    spans: dict[_Key, _Span] = {}
    own: dict[_Key, _Span] = {}
    taken = TrainedAnswers(calls)
    number = 0  # of the trajectory's own turns
    for call in calls:
        is_turn = call.trajectory_id == trajectory_id and taken.is_turn(call)
        number += is_turn
        for choice in call.choices:
            key = (call.id, choice.index)
            parent = spans.get((call.parent_call or "", call.parent_choice)) if call.context == "exact" else None
            if call.context == "exact" and parent is None:
                untrained["context_unknown"] += _size(choice)
                continue
            earned = by_role.get(call.role or "", advantage)
            spans[key] = span = _Span(call, choice, parent, earned, by_turn.get(number, 0.0) if is_turn else 0.0)
            if call.trajectory_id != trajectory_id:
                continue
            reason = why_untrainable(call, choice, imitated=imitated) or taken.why_not(call, choice)
            if reason is None and not roles.trains(call.role):
                reason = UNTRAINED_ROLE
            if reason is None and mask_truncated and choice.finish_reason == _CUT_AT_LONGEST:
                reason = TRUNCATED
            if reason:
                untrained[reason] += _size(choice)
            else:
                own[key] = span
    return Rows(rows=tuple(_cover(trajectory_id, own)), untrained=dict(untrained))


def why_untrainable(call: Call, choice: Choice, *, imitated: bool = False) -> str | None:
    """Return why no token of this answer may carry loss; None where all may."""
    if call.state is not CallState.ANSWERED:
        return str(call.state)
    if call.untrainable:
        return call.untrainable
    if not choice.token_ids:
        return "no_token_ids"
    if len(choice.token_ids) != len(choice.logprobs):
        return "length_mismatch"
    return None if imitated else _why_odd_sampling(call.sampling)


def _why_odd_sampling(sampling: Mapping[str, Any]) -> str | None:
    temperature = _temperature(sampling)
    if temperature is None:
        return "invalid_temperature"
    if temperature < _GREEDY_BELOW:
        return "greedy"
    form = sampling.get("response_format")
    formed = form is not None and not (isinstance(form, dict) and form.get("type") == "text")
    if formed or any(sampling.get(name) for name in _CONSTRAINTS):
        return "constrained_sampling"
    if sampling.get("tool_choice") not in (None, "auto", "none"):
        return "constrained_sampling"
    return "constrained_tool_calls" if sampling.get(TOOL_GRAMMAR) else None


def _temperature(sampling: Mapping[str, Any]) -> float | None:
    """Return the temperature that was sampled at, 1.0 where none was given; None where it is no sound number."""
    given = sampling.get("temperature")
    try:
        temperature = 1.0 if given is None else float(given)
    except (TypeError, ValueError):
        return None
    return temperature if math.isfinite(temperature) and temperature >= 0 else None


class TrainedAnswers:
    """Which answers of a trajectory's calls earn its score: those that the agent had, and went on or ended with.

    Of several answers to one call those count that the agent went on with, and where it ended with the call, the one
    that the transcript ends with: the first.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._continued = {(call.parent_call, call.parent_choice) for call in calls}
        self._repeated = {_prompt(call): call.id for call in calls if call.linked_by in _REPEATS}

    def is_turn(self, call: Call) -> bool:
        """Whether the agent got an answer of this call: no failed call, and none that was asked again."""
        return call.state is CallState.ANSWERED and any(
            self.why_not(call, choice) != _ANSWER_LOST for choice in call.choices
        )

    def why_not(self, call: Call, choice: Choice) -> str | None:
        """Return why an answer does not count; None where it does."""
        if (call.id, choice.index) in self._continued:
            return None
        if any((call.id, one.index) in self._continued for one in call.choices):
            return "answer_discarded"
        if self._repeated.get(_prompt(call), call.id) != call.id:
            return _ANSWER_LOST
        return None if choice.index == call.choices[0].index else "answer_discarded"


def _prompt(call: Call) -> tuple[str | None, int, str]:
    return call.parent_call, call.parent_choice, call.prompt_node


def _size(choice: Choice) -> int:
    return len(choice.token_ids) // 4


class _Span:
    """One answer in its context: a link of a chain of token-exact continuations."""

    def __init__(self, call: Call, choice: Choice, parent: _Span | None, advantage: float, more: float) -> None:
        self.key: _Key = (call.id, choice.index)
        self.parent = parent
        self.more = more  # that its own turn earned
        self.prompt = unpack_ids(call.prompt_ids)
        self.token_ids = unpack_ids(choice.token_ids)
        self.logprobs = unpack_logprobs(choice.logprobs)
        neutral = all(call.sampling.get(name) in values for name, values in _NEUTRAL.items())
        self.kind = (_temperature(call.sampling) or 1.0, neutral, advantage)  # what is one for a whole row

    def chain(self) -> list[_Span]:
        """Return the spans from the first one to this one."""
        found: list[_Span] = []
        span: _Span | None = self
        while span is not None:
            found.append(span)
            span = span.parent
        return found[::-1]


def _cover(trajectory_id: str, own: Mapping[_Key, _Span]) -> list[TokenRow]:
    """Cover every trainable span by one row: the last ones first, so that long chains become single rows.

    A row has one temperature and one advantage; a chain that changed them gives one row for each.
    """
    rows: list[TokenRow] = []
    covered: set[_Key] = set()
    for key in reversed(list(own)):
        if key in covered:
            continue
        chain = own[key].chain()
        while remaining := [span for span in chain if span.key in own and span.key not in covered]:
            kind = remaining[-1].kind
            trained = {span.key for span in remaining if span.kind == kind}
            last = max(place for place, span in enumerate(chain) if span.key in trained)
            rows.append(_row(trajectory_id, chain[: last + 1], trained, kind))
            covered |= trained
    return rows[::-1]


def _row(trajectory_id: str, chain: Sequence[_Span], trained: set[_Key], kind: tuple[float, bool, float]) -> TokenRow:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    more: list[float] = []
    for span in chain:
        ids += span.prompt + span.token_ids
        carries = span.key in trained
        mask += [0] * len(span.prompt) + [int(carries)] * len(span.token_ids)
        logprobs += [0.0] * len(span.prompt) + (list(span.logprobs) if carries else [0.0] * len(span.token_ids))
        more += [0.0] * len(span.prompt) + [span.more if carries else 0.0] * len(span.token_ids)
    temperature, neutral, advantage = kind
    return TokenRow(
        trajectory_id=trajectory_id,
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantage=advantage,
        temperature=temperature,
        advantages=tuple(advantage + one for one in more) if any(more) else None,
        importance=neutral,
    )
