"""Judges and their verdicts: one verdict per trajectory. An error is a verdict with a `failure`, never a score.

Limits hold for every judge, plug-ins included: a score and its components are finite numbers of at most MAX_SCORE; more
than MAX_COMPONENTS are a failure. A longer explanation or failure is cut.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import msgspec

from ratchet.store.records import JudgeRequest, TeacherScore, Transcript, Verdict
from ratchet.store.statistics import SCORE_RANGE, number_of

MAX_COMPONENTS = 1000
MAX_NAME_CHARS = 200  # of a component
MAX_EXPLANATION_CHARS = 20_000
MAX_FAILURE_CHARS = 2000


def within_limits(verdict: Verdict) -> Verdict:
    """Return a verdict as it may be stored; a score outside the limits, or with such components, is a failure."""
    changes: dict[str, Any] = {}
    if verdict.score is not None and (problem := _problem(verdict)):
        changes |= {"score": None, "failure": problem, "components": {}}
    if len(verdict.explanation) > MAX_EXPLANATION_CHARS:
        changes["explanation"] = cut(verdict.explanation)
    if verdict.failure is not None and len(verdict.failure) > MAX_FAILURE_CHARS:
        changes["failure"] = cut(verdict.failure, MAX_FAILURE_CHARS)
    return msgspec.structs.replace(verdict, **changes) if changes else verdict


def components_problem(components: Mapping[str, Any]) -> str | None:
    """Return why these components of a score cannot be stored; None if they can."""
    if len(components) > MAX_COMPONENTS:
        return f"there are {len(components):,} components, and at most {MAX_COMPONENTS:,} are stored: return fewer"
    for name, value in components.items():
        if len(name) > MAX_NAME_CHARS:
            return f"the name of component {name[:40]!r}... is longer than {MAX_NAME_CHARS} characters"
        if number_of(value) is None:
            return f"component {name!r} is {value!r:.50}, no finite number {SCORE_RANGE}"
    return None


def cut(text: str, limit: int = MAX_EXPLANATION_CHARS) -> str:
    """Return a text; of one that is longer than the limit the beginning, with a note of its length."""
    note = f" [cut: {len(text):,} characters]"
    return text if len(text) <= limit else text[: limit - len(note)] + note


def _problem(verdict: Verdict) -> str | None:
    if number_of(verdict.score) is None:
        return f"the judge gave the score {verdict.score!r:.50}, which is no finite number {SCORE_RANGE}"
    return components_problem(verdict.components)


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """The result of a judge for one trajectory: a score with an explanation, or a failure."""

    score: float | None
    failure: str | None
    explanation: str = ""
    components: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, score: float, explanation: str = "", components: Mapping[str, float] | None = None) -> DraftVerdict:
        return cls(float(score), None, explanation, components or {})

    @classmethod
    def failed(cls, reason: str) -> DraftVerdict:
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


@dataclass(frozen=True, slots=True)
class GroupJudgement:
    """The verdicts on a group, one per member in order, and the judge's requests to models.

    teacher_scores  of members that a teacher scored
    unavailable     why the judge could judge nothing now: its verdicts do not count, and the group is judged again
    """

    verdicts: tuple[Verdict, ...]
    judge_requests: tuple[JudgeRequest, ...] = ()
    teacher_scores: tuple[TeacherScore, ...] = ()
    unavailable: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdicts", tuple(map(within_limits, self.verdicts)))


class Judge(Protocol):
    """Scores the members of a group. A judge whose scores depend on the other members has `compares = True`."""

    @property
    def name(self) -> str:
        """Return the name shown to people, such as `my_rules:judge`."""

    @property
    def version(self) -> str:
        """Return a hash of code and rubric; verdicts of different versions are not comparable."""

    @property
    def concurrency(self) -> int:
        """Return the number of groups that it can judge at the same time, each in its own thread."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order. Errors are verdicts with a failure; does not raise."""

    def close(self) -> None:
        """Close connections; the judge is not used afterwards."""


class NamedJudge:
    """A judge that records verdicts under its name and version; by default it scores each member alone, by `opinion`.

    A kind sets `name` and `version`.
    """

    name: str
    version: str
    concurrency: int = 1
    compares: bool = False

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        return GroupJudgement(tuple(self.record(self.opinion(member), group_id, member) for member in members))

    def opinion(self, member: Transcript) -> DraftVerdict:
        """Return the draft verdict on one trajectory."""
        raise NotImplementedError

    def record(self, opinion: DraftVerdict, group_id: str | None, member: Transcript, **figures: Any) -> Verdict:
        """Return the verdict for the store; `figures` are those of DraftVerdict.verdict."""
        return opinion.verdict(
            member, group_id, judge=self.name, version=self.version, judged_at=self._clock(), **figures
        )

    def close(self) -> None:
        """Close what the kind holds open."""


def compares(judge: Judge) -> bool:
    return bool(getattr(judge, "compares", False))


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
    if "score" in found:
        return found
    components = found.get("metrics") if found.get("components") is None else found["components"]
    return {**found, "score": found.get("reward"), "components": components}


def last_answer(member: Transcript) -> str:
    """Return the text of the last assistant message, "" if there is none."""
    return next((text_of(one) for one in reversed(member.messages) if one.get("role") == "assistant"), "")


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, without reasoning fields."""
    content = message.get("content")
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
