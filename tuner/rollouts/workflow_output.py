"""Outcomes: what a workflow returned, as response, reward and metrics; the response as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

from ratchet.trainer.errors import WorkflowFailed

_PARTS = frozenset({"response", "reward", "metrics"})
_LONGEST = 4 * 2**20  # characters of a response
_DEEPEST = 50


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a rollout came to. `response` is JSON; `reward` None where a judge is to say; `metrics` name -> number."""

    response: Any = None
    reward: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str | None:
        """The response as JSON text; None where there is none."""
        return None if self.response is None else json.dumps(self.response)


def outcome_of(answer: Any) -> Outcome:
    """Read what a workflow returned. Raises WorkflowFailed.

    A mapping whose keys are all among response, reward and metrics, or an object with `response` and one of the others,
    is taken apart; anything else is the response.
    """
    if isinstance(answer, Outcome):
        return answer
    if isinstance(answer, Mapping) and answer and set(answer) <= _PARTS:
        parts = answer
    elif hasattr(answer, "response") and (hasattr(answer, "reward") or hasattr(answer, "metrics")):
        parts = {name: getattr(answer, name, None) for name in _PARTS}
    else:
        parts = {"response": answer}
    response = plain(parts.get("response"))
    if response is not None and len(json.dumps(response)) > _LONGEST:
        raise WorkflowFailed(f"the response is longer than {_LONGEST:,} characters; return what the judge needs")
    return Outcome(response, _reward(parts.get("reward")), _metrics(parts.get("metrics")))


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not _is_finite(value):
        raise WorkflowFailed(f"the reward is {value!r:.100}; return a finite number, or None for the judge to say")
    return float(value)


def _metrics(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WorkflowFailed(f"metrics is {type(value).__name__}; return a mapping of names to numbers")
    wrong = [name for name, number in value.items() if not _is_finite(number)]
    if wrong:
        raise WorkflowFailed(f"metrics holds no finite number for {', '.join(map(str, wrong[:5]))}")
    return {str(name): float(number) for name, number in value.items()}


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON; None for an object that nothing can be read from.

    Records (dataclasses, pydantic models, objects with `to_dict`) become mappings; a message that tells its text, as
    agents' frameworks make them, becomes that text.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > _DEEPEST:
        raise WorkflowFailed(f"the response is nested deeper than {_DEEPEST} levels, or holds itself")
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
