"""What a workflow returns: response, reward and metrics, and how any other return value is read as such."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from ratchet.store.scores import SCORE_RANGE, number_of
from ratchet.trainer.errors import WorkflowFailed

_PARTS = frozenset({"response", "reward", "metrics"})
_MAX_RESPONSE_CHARS = 4 * 2**20  # characters of a response
_MAX_DEPTH = 50


@dataclasses.dataclass(frozen=True, slots=True)
class WorkflowOutput:
    """What a workflow returns.

    response  the answer that the judge gets; messages are converted to text, records to mappings
    reward    the workflow's own score, a finite number of at most 1e9; None leaves it to the judge
    metrics   name -> number, shown and stored beside the score
    """

    response: Any = None
    reward: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str | None:
        """The response as JSON text, or None."""
        return None if self.response is None else json.dumps(self.response)


def outcome_of(answer: Any) -> WorkflowOutput:
    """Read a workflow's return value. Raises WorkflowFailed.

    A mapping with no keys besides response, reward and metrics, or an object with `response` and one of the others, is
    split into these parts; any other value is the response.
    """
    if isinstance(answer, Mapping) and answer and set(answer) <= _PARTS:
        parts = answer
    elif hasattr(answer, "response") and (hasattr(answer, "reward") or hasattr(answer, "metrics")):
        parts = {name: getattr(answer, name, None) for name in _PARTS}
    else:
        parts = {"response": answer}
    response = plain(parts.get("response"))
    if response is not None and len(json.dumps(response)) > _MAX_RESPONSE_CHARS:
        raise WorkflowFailed(
            f"the response is longer than {_MAX_RESPONSE_CHARS:,} characters; return only what the judge needs"
        )
    return WorkflowOutput(response, _reward(parts.get("reward")), _metrics(parts.get("metrics")))


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    reward = number_of(value)
    if reward is None:
        raise WorkflowFailed(
            f"the reward is {value!r:.100}; return a finite number {SCORE_RANGE}, or None to leave it to the judge"
        )
    return reward


def _metrics(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WorkflowFailed(f"metrics is {type(value).__name__}; return a mapping of names to numbers")
    wrong = [name for name, number in value.items() if number_of(number) is None]
    if wrong:
        raise WorkflowFailed(f"metrics holds no finite number {SCORE_RANGE} for {', '.join(map(str, wrong[:5]))}")
    return {str(name): float(number) for name, number in value.items()}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON; None for an object without readable content.

    Records (dataclasses, pydantic models, objects with `to_dict`) become mappings; a message object with
    `get_text_content`, as agent frameworks have, becomes its text.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > _MAX_DEPTH:
        raise WorkflowFailed(f"the response is nested deeper than {_MAX_DEPTH} levels, or contains itself")
    if isinstance(value, Mapping):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, depth + 1) for inner in value]
    for name in ("get_text_content", "model_dump", "to_dict"):
        method = getattr(value, name, None)
        if callable(method) and not isinstance(value, type):
            return plain(method(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    kind: Any = type(value)
    return None if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__ else str(value)
