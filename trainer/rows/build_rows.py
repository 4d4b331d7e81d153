"""Builds the token rows of a trajectory for the learner. Pure.

Calls that continue each other token for token form one row. A fork of the context, a new segment or branch, and roles
with different advantages start another row. Promises: every trained token was sampled by vLLM in an answered call of
this trajectory and is trained in exactly one row; untrained tokens are counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ratchet.store.records import TOOL_GRAMMAR, Call, Choice, unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from ratchet.trainer.rows.token_row import UNTRAINED_ROLE, Roles, TokenRow

AnswerKey = tuple[str, int]  # call id, choice index
_Truncation = tuple[int, float, float]  # top_k, top_p, min_p
_Kind = tuple[float, _Truncation | None, bool, float]  # temperature, truncation, without penalties, advantage

# Sampling parameters that change the distribution by what was sampled before, with their neutral values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
}

# Parameters that mask tokens before sampling: logprobs then belong to the rest, and forced ones carry no signal.
_CONSTRAINTS = (
    "allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "structured_outputs",
)  # fmt: skip
ALL_ROLES = Roles()
TRUNCATED = "truncated"  # reason for untrained tokens
UNSCORED = "no_teacher_logprobs"  # reason for untrained tokens
PENALIZED = "penalized_sampling"  # reason for untrained tokens
_ANSWER_LOST = "answer_lost"
_LENGTH_LIMIT = "length"  # finish reason of an answer that reached max_tokens or the model's context length
_REPEATS = ("retry", "resend")  # links of calls that repeat a call whose answer was lost
_GREEDY_BELOW = 0.01  # vLLM raises temperatures between 0 and this value to it


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a trajectory, and the counts of untrained sampled tokens by reason.

    answers            of each row: where the tokens of its trained answers begin, by answer
    untrained_answers  the reason by answer
    """

    rows: tuple[TokenRow, ...]
    untrained: Mapping[str, int]
    answers: tuple[Mapping[AnswerKey, int], ...] = ()
    untrained_answers: Mapping[AnswerKey, str] = field(default_factory=dict)


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
    penalized: bool = False,
    teacher: Mapping[AnswerKey, Sequence[float]] | None = None,
) -> Rows:
    """Return the rows of a trajectory.

    `calls` are its own and those of earlier trajectories that it continues, ordered by `parents_first`; only its
    own carry loss.
    `by_role` overrides the advantage for calls of these roles. `by_turn` is added to the advantage of tokens by turn,
    counted from 1; turns are the trajectory's calls whose answer the agent received. With `mask_truncated`, answers
    that reached their length limit carry no loss. Answers sampled with penalties, a logit bias or min_tokens carry loss
    only if `penalized`, without importance weights. `imitated` rows (SFT) may have been sampled greedily or under
    constraints, because SFT uses no probability ratio. With the logprobs of a `teacher` by answer, their differences
    from vLLM's are added to the advantages of the tokens; answers that it did not score carry no loss.
    """
    untrained: Counter[str] = Counter()
    reasons: dict[AnswerKey, str] = {}
    spans: dict[AnswerKey, _Span] = {}
    own_spans: dict[AnswerKey, _Span] = {}
    answers = TrainedAnswers(calls)
    number = 0  # of the turn
    for call in calls:
        is_turn = call.trajectory_id == trajectory_id and answers.is_turn(call)
        number += is_turn
        for choice in call.choices:
            key = (call.id, choice.index)
            parent = spans.get((call.parent_call or "", call.parent_choice)) if call.context == "exact" else None
            if call.context == "exact" and parent is None:
                untrained["context_unknown"] += _size(choice)
                if call.trajectory_id == trajectory_id:
                    reasons[key] = "context_unknown"
                continue
            base_advantage = by_role.get(call.role or "", advantage)
            spans[key] = span = _Span(
                call, choice, parent, base_advantage, by_turn.get(number, 0.0) if is_turn else 0.0, teacher
            )
            if call.trajectory_id != trajectory_id:
                continue
            reason = why_untrainable(call, choice, imitated=imitated) or answers.why_not(call, choice)
            if reason is None and not roles.trains(call.role):
                reason = UNTRAINED_ROLE
            if reason is None and not (penalized or imitated) and not _is_neutral(call.sampling):
                reason = PENALIZED
            if reason is None and mask_truncated and choice.finish_reason == _LENGTH_LIMIT:
                reason = TRUNCATED
            if reason is None and teacher is not None and len(teacher.get(key, ())) != len(span.token_ids):
                reason = UNSCORED
            if reason:
                untrained[reason] += _size(choice)
                reasons[key] = reason
            else:
                own_spans[key] = span
    covered = _cover(trajectory_id, own_spans)
    return Rows(tuple(row for row, _ in covered), dict(untrained), tuple(answers for _, answers in covered), reasons)


def why_untrainable(call: Call, choice: Choice, *, imitated: bool = False) -> str | None:
    """Return why no token of this answer may carry loss; None if all may."""
    if call.state is not CallState.ANSWERED:
        return str(call.state)
    if call.untrainable:
        return call.untrainable
    if not choice.token_ids:
        return "no_token_ids"
    if len(choice.token_ids) != len(choice.logprobs):
        return "length_mismatch"
    return None if imitated else _why_odd_sampling(call.sampling, call.prompt_tokens + _size(choice))


def _why_odd_sampling(sampling: Mapping[str, Any], tokens: int) -> str | None:
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
    # vLLM ends a thought that uses up its budget. It counts from where the thought was opened, perhaps in the prompt.
    budget = sampling.get("thinking_token_budget")
    if budget not in (None, -1) and (isinstance(budget, bool) or not isinstance(budget, int) or tokens > budget):
        return "constrained_sampling"
    return "constrained_tool_calls" if sampling.get(TOOL_GRAMMAR) else None


def _temperature(sampling: Mapping[str, Any]) -> float | None:
    """Return the sampling temperature, 1.0 by default; None if it is invalid."""
    value = sampling.get("temperature")
    try:
        temperature = 1.0 if value is None else float(value)
    except (TypeError, ValueError):
        return None
    return temperature if math.isfinite(temperature) and temperature >= 0 else None


def _is_neutral(sampling: Mapping[str, Any]) -> bool:
    """Return whether no penalty, bias or least length changed the probabilities."""
    return all(sampling.get(name) in values for name, values in _NEUTRAL.items())


def _truncation(sampling: Mapping[str, Any]) -> _Truncation | None:
    """Return top_k, top_p and min_p, as vLLM reads them; None if they leave all tokens."""
    top_k, top_p, min_p = sampling.get("top_k"), sampling.get("top_p"), sampling.get("min_p")
    found = max(0, int(top_k or 0)), 1.0 if top_p is None else float(top_p), float(min_p or 0.0)
    return None if found == (0, 1.0, 0.0) else found


class TrainedAnswers:
    """Selects the answers that are credited with the trajectory's score: those that the agent received and used.

    Of several answers to one call, those count that the agent continued; if it continued none, the first one, with
    which the transcript ends.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._continued = {(call.parent_call, call.parent_choice) for call in calls}
        self._repeated = {_prompt(call): call.id for call in calls if call.linked_by in _REPEATS}

    def is_turn(self, call: Call) -> bool:
        """Return whether the agent received an answer of this call: it neither failed nor was repeated."""
        return call.state is CallState.ANSWERED and any(
            self.why_not(call, choice) != _ANSWER_LOST for choice in call.choices
        )

    def why_not(self, call: Call, choice: Choice) -> str | None:
        """Return why an answer does not count; None if it does."""
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
    """One answer with its context: a link in a chain of token-exact continuations."""

    def __init__(
        self,
        call: Call,
        choice: Choice,
        parent: _Span | None,
        advantage: float,
        turn_advantage: float,
        teacher: Mapping[AnswerKey, Sequence[float]] | None,
    ) -> None:
        self.key: AnswerKey = (call.id, choice.index)
        self.parent = parent
        self.prompt = unpack_ids(call.prompt_ids)
        self.token_ids = unpack_ids(choice.token_ids)
        self.logprobs = unpack_logprobs(choice.logprobs)
        self.token_advantages = [turn_advantage] * len(self.token_ids)  # beside the row's own
        if teacher is not None:
            pairs = zip(teacher.get(self.key, ()), self.logprobs, strict=False)  # lengths are compared later
            self.token_advantages = [turn_advantage + scored - sampled for scored, sampled in pairs]
        self.kind = (  # constant within a row
            _temperature(call.sampling) or 1.0, _truncation(call.sampling), _is_neutral(call.sampling), advantage,
        )  # fmt: skip

    def chain(self) -> list[_Span]:
        """Return the spans from the first one to this one."""
        spans: list[_Span] = []
        span: _Span | None = self
        while span is not None:
            spans.append(span)
            span = span.parent
        return spans[::-1]


def _cover(trajectory_id: str, own_spans: Mapping[AnswerKey, _Span]) -> list[tuple[TokenRow, Mapping[AnswerKey, int]]]:
    """Cover each trainable span with one row, last spans first, so that long chains become single rows.

    Returns each row with the places of its answers. A row has one temperature and one advantage; a chain with several
    of them gets one row for each.
    """
    rows: list[tuple[TokenRow, Mapping[AnswerKey, int]]] = []
    covered: set[AnswerKey] = set()
    for key in reversed(list(own_spans)):
        if key in covered:
            continue
        chain = own_spans[key].chain()
        while remaining := [span for span in chain if span.key in own_spans and span.key not in covered]:
            kind = remaining[-1].kind
            trained = {span.key for span in remaining if span.kind == kind}
            last = max(place for place, span in enumerate(chain) if span.key in trained)
            rows.append(_row(trajectory_id, chain[: last + 1], trained, kind))
            covered |= trained
    return rows[::-1]


def _row(
    trajectory_id: str, chain: Sequence[_Span], trained: set[AnswerKey], kind: _Kind
) -> tuple[TokenRow, Mapping[AnswerKey, int]]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    token_advantages: list[float] = []
    answers: dict[AnswerKey, int] = {}
    for span in chain:
        carries, context, sampled = span.key in trained, len(span.prompt), len(span.token_ids)
        if carries:
            answers[span.key] = len(ids) + context
        ids += span.prompt + span.token_ids
        mask += [0] * context + [int(carries)] * sampled
        logprobs += [0.0] * context + (list(span.logprobs) if carries else [0.0] * sampled)
        token_advantages += [0.0] * context + (span.token_advantages if carries else [0.0] * sampled)
    temperature, truncation, neutral, advantage = kind
    row = TokenRow(
        trajectory_id=trajectory_id,
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantage=advantage,
        temperature=temperature,
        advantages=tuple(advantage + one for one in token_advantages) if any(token_advantages) else None,
        importance=neutral,
        truncation=truncation,
    )
    return row, answers
