"""Draft verdicts: the result of a judge for one trajectory, before it becomes a record of the store. Pure."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ratchet.store.records import Transcript, Verdict
from ratchet.store.statistics import SCORE_RANGE, number_of
from ratchet.trainer.controller.judges.limits import MAX_FAILURE_CHARS, components_problem, cut


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """A score with an explanation, or a failure; created by `of` and `failed`."""

    score: float | None
    failure: str | None
    explanation: str = ""
    components: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, score: float, explanation: str = "", components: Mapping[str, float] | None = None) -> DraftVerdict:
        """Return a score."""
        return cls(float(score), None, explanation, components or {})

    @classmethod
    def failed(cls, reason: str) -> DraftVerdict:
        """Return a failure with the beginning of its reason."""
        return cls(None, cut(reason, MAX_FAILURE_CHARS))

    def verdict(
        self,
        member: Transcript,
        group_id: str | None,
        *,
        judge: str,
        version: str,
        cost: float | None = 0.0,
        latency: float = 0.0,
        judged_at: float,
        judge_request_id: str | None = None,
    ) -> Verdict:
        """Return the record for the store."""
        return Verdict(
            trajectory_id=member.trajectory.id,
            group_id=group_id,
            judge=judge,
            judge_version=version,
            score=self.score,
            failure=self.failure,
            explanation=self.explanation,
            components=self.components,
            cost=cost,
            latency=latency,
            judged_at=judged_at,
            judge_request_id=judge_request_id,
        )


_PARTS = ("score", "reward", "components", "metrics", "explanation")
NO_RETURN = "the judge returned nothing (None)"  # start of the failure of a missing return


def read(answer: Any) -> DraftVerdict:
    """Convert a number, a bool, or a mapping or object with `score`, `components` and `explanation`.

    `reward` is accepted for `score`, and then `metrics` for `components`. Other values, and numbers that are not finite
    or too large, are failures.
    """
    if answer is None:
        return DraftVerdict.failed(f"{NO_RETURN}: a return is missing, or `return 0.0` for a wrong answer")
    parts = _parts(answer)
    score, components = number_of(parts.get("score")), parts.get("components") or {}
    if score is None:
        return DraftVerdict.failed(f"the judge returned {answer!r:.200}, which has no finite score {SCORE_RANGE}")
    if not isinstance(components, Mapping):
        return DraftVerdict.failed(f"the judge returned components that are no mapping: {components!r:.200}")
    named = {str(name): value for name, value in components.items()}
    if problem := components_problem(named):
        return DraftVerdict.failed(problem)
    values = {name: float(value) for name, value in named.items()}
    return DraftVerdict.of(score, str(parts.get("explanation") or ""), values)


def _parts(answer: Any) -> Mapping[str, Any]:
    if isinstance(answer, Mapping):
        found = dict(answer)
    elif hasattr(answer, "score") or hasattr(answer, "reward"):
        found = {name: getattr(answer, name) for name in _PARTS if hasattr(answer, name)}
    else:
        return {"score": answer}
    return found if "score" in found else {**found, "score": found.get("reward"), "components": _components(found)}


def _components(found: Mapping[str, Any]) -> Any:
    return found.get("metrics") if found.get("components") is None else found["components"]


def last_answer(member: Transcript) -> str:
    """Return the text of the last assistant message, "" if there is none."""
    none: Mapping[str, Any] = {}
    content = next((m for m in reversed(member.messages) if m.get("role") == "assistant"), none).get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def response_of(member: Transcript) -> Any:
    """Return the response of a rollout's workflow, if it returned one; else the last answer."""
    text = member.returned.response if member.returned is not None else None
    return last_answer(member) if text is None else json.loads(text)


def version_of(*parts: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of a judge's code and settings; of a module, its source."""
    texts = (inspect.getsource(part) if isinstance(part, ModuleType) else str(part) for part in parts)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
