"""What a judge is told, by kind; parsed once at the door. Unknown names are errors; no key stands here.

Keys come from the environment: RATCHET_JUDGE_API_KEY for language models, RATCHET_GRADER_SECRET for HTTP graders, or
the variable that `api_key_env` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

from ratchet.trainer.user_code.entry_points import ENTRY_POINT

_NAMED_IN_A_MODULE = re.compile(r"[\w.]+:\w+")
DROP: Final = "drop"

RUBRIC = """\
- A trajectory that reaches its goal scores far above one that does not, whatever else it does well.
- Of two that reach it, the one with fewer wasted steps scores a little higher.
- Of two that fail, the one that came closer scores a little higher.
- What a trajectory claims counts only as far as its own tool results support it.
- "I do not know" beats a wrong answer."""


def _entry_point(given: str) -> str:
    """Return the name of something in a module. Raises ValueError."""
    if not _NAMED_IN_A_MODULE.fullmatch(given):
        raise ValueError(f"{given!r} is not of the form module:name, such as my_agent.judge:judge")
    return given


def _function(given: str) -> str:
    """Return the name of a function in a module or in a file. Raises ValueError."""
    if not ENTRY_POINT.fullmatch(given):
        raise ValueError(
            f"{given!r} is not of the form module:function or path/file.py:function, such as my_agent.judge:judge"
        )
    return given


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class FunctionSpec(_Spec):
    """A Python function."""

    kind: Literal["function"] = "function"
    function: Annotated[str, AfterValidator(_function)] = Field(
        description="the function, as module:function or path/file.py:function"
    )
    concurrency: int = Field(1, ge=1, le=64, description="groups judged at the same time, each in a thread of its own")


class AnswerSpec(_Spec):
    """The answer against the right one of its task: 1 or 0."""

    kind: Literal["answer"]
    answers: Path | None = Field(
        None, description="JSON Lines file with `task` and `answer` (a string or a list of them) per line"
    )
    column: str | None = Field(None, description="instead: column of the task set that holds the right answer")
    match: Literal["exact", "contains", "numeric"] = Field("exact", description="how the two are compared")
    max_chars: int = Field(400, ge=1, description="with contains: an answer of more characters is no answer")
    tolerance: float = Field(1e-6, ge=0, description="with numeric: relative difference that still counts as equal")

    @model_validator(mode="after")
    def _answers_are_somewhere(self) -> AnswerSpec:
        if (self.answers is None) == (self.column is None):
            raise ValueError("give `answers`, a file, or `column`, a column of the task set: one of them")
        return self


class RewardSpec(_Spec):
    """The reward that the workflow of a rollout returned itself."""

    kind: Literal["workflow"]
    failure_score: float = Field(0.0, description="score of a rollout that failed")


class BehaviorSpec(_Spec):
    """How the trajectory went, between 0 (bad) and 1 (good)."""

    kind: Literal["behavior"]
    rule: Literal["short", "few_tool_calls", "tools", "ended", "pattern"] = Field(description="what is looked at")
    limit: int = Field(1024, ge=1, description="sampled tokens (short) or tool calls (few_tool_calls) that score 0")
    pattern: str = Field("", description="with pattern: regular expression that the whole last answer must match")

    @model_validator(mode="after")
    def _pattern_is_one(self) -> BehaviorSpec:
        import re

        if self.rule == "pattern" and not self.pattern:
            raise ValueError("rule pattern needs `pattern`, a regular expression")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        return self


class ModelSpec(_Spec):
    """A language model at any OpenAI-compatible URL."""

    base_url: str = Field(description="base URL, with or without /v1; this project's own proxy will do")
    model: str = Field(min_length=1, description="the model's name there")
    api_key_env: str = Field("RATCHET_JUDGE_API_KEY", pattern=r"^[A-Z][A-Z0-9_]*$", description="variable of the key")
    timeout_seconds: float = Field(120.0, gt=0, description="longest wait for one answer")
    max_attempts: int = Field(
        3, ge=1, le=10, description="tries until an answer is usable; each is told what was wrong"
    )
    context_tokens: int = Field(32_000, ge=512, description="room for the question; longer messages are cut")
    max_images: int = Field(
        0, ge=0, le=64, description="images that it is shown, where it can see; others are described"
    )
    temperature: float | None = Field(None, ge=0, description="sampling temperature; null leaves it to the model")
    input_cost_per_million: float | None = Field(
        None, ge=0, description="price of a million prompt tokens; null: unknown"
    )
    output_cost_per_million: float | None = Field(
        None, ge=0, description="price of a million completion tokens; null: unknown"
    )
    concurrency: int = Field(4, ge=1, le=64, description="groups judged at the same time")

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1")
        return url.rstrip("/")


class RulerSpec(ModelSpec):
    """A language model that ranks the members of a group against each other (RULER)."""

    kind: Literal["ruler"]
    rubric: str = Field(RUBRIC, min_length=1, description="what is better than what, in words")


class NextStateSpec(ModelSpec):
    """A language model that reads what came after each answer: did the user or the tool go on content?"""

    kind: Literal["next_state"]
    rubric: str = Field("", description="further words for the model on what counts as content")


class GraderSpec(_Spec):
    """An HTTP service that is sent the whole trajectory."""

    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://", description="where the trajectory is POSTed as JSON")
    secret_env: str = Field(
        "RATCHET_GRADER_SECRET", pattern=r"^[A-Z][A-Z0-9_]*$", description="variable of the secret that signs requests"
    )
    timeout_seconds: float = Field(60.0, gt=0, description="longest wait for one answer")
    max_attempts: int = Field(3, ge=1, le=10, description="tries per trajectory, with the same idempotency key")
    concurrency: int = Field(4, ge=1, le=64, description="groups graded at the same time")


class OpenJudgeSpec(_Spec):
    """A grader of OpenJudge, in a process of its own."""

    kind: Literal["openjudge"]
    grader: Annotated[str, AfterValidator(_entry_point)] = Field(description="the grader's class, as module:Class")
    settings: Mapping[str, Any] = Field(default_factory=dict, description="what the grader is made with")
    arguments: Mapping[str, Any] = Field(default_factory=dict, description="constants that it is given each time")
    columns: Mapping[str, str] = Field(
        default_factory=dict, description="parameters that are read from columns of the task's row"
    )
    worst: float = Field(0.0, description="the grader's score that counts 0")
    best: float = Field(1.0, description="the grader's score that counts 1")
    python: Path | None = Field(None, description="Python of the environment with py-openjudge; null: this one")
    api_key_env: str = Field("RATCHET_JUDGE_API_KEY", pattern=r"^[A-Z][A-Z0-9_]*$", description="variable of the key")
    timeout_seconds: float = Field(120.0, gt=0, description="longest wait for the scores of one group")

    @model_validator(mode="after")
    def _scale_has_two_ends(self) -> OpenJudgeSpec:
        if self.worst == self.best:
            raise ValueError("worst and best are the same: every score would count the same")
        return self


class FeedbackSpec(_Spec):
    """What people said of the trajectory."""

    kind: Literal["feedback"]
    within_seconds: float = Field(86_400.0, gt=0, description="how long after its last call a trajectory waits for it")
    missing: Literal["drop"] | float = Field(DROP, description="after that: put it aside (drop), or score it so")
    worst: float = Field(0.0, description="the value that scores 0; whatever is worse does as well")
    best: float = Field(1.0, description="the value that scores 1")

    @model_validator(mode="after")
    def _scale_has_two_ends(self) -> FeedbackSpec:
        if self.worst == self.best:
            raise ValueError("worst and best are the same: every value would score the same")
        if self.missing != DROP and not 0.0 <= float(self.missing) <= 1.0:
            raise ValueError(f"missing {self.missing} is not between 0 and 1, as scores are; or set it to drop")
        return self


class PartSpec(_Spec):
    """One part of a composite: a weighted score, or a penalty for not being good."""

    name: str = Field(pattern=r"^\w+$", description="name of the component")
    judge: JudgeSpec = Field(description="the judge of this part")
    weight: float | None = Field(None, gt=0, description="weight of its score")
    penalty: float | None = Field(None, gt=0, description="taken off at a score of 0, nothing at 1")

    @model_validator(mode="after")
    def _one_role(self) -> PartSpec:
        if (self.weight is None) == (self.penalty is None):
            raise ValueError(f"part {self.name}: give weight or penalty, one of them")
        return self


class CompositeSpec(_Spec):
    """Several judges as one: the weighted mean of the scores, less bounded penalties."""

    kind: Literal["composite"]
    parts: tuple[PartSpec, ...] = Field(min_length=1, description="the parts")
    min_gap: float = Field(
        1.0,
        gt=0,
        description="smallest difference between a success and a failure in the weighted mean, behavior apart",
    )

    @model_validator(mode="after")
    def _success_stays_above(self) -> CompositeSpec:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError("two parts have the same name")
        if not any(part.weight for part in self.parts):
            raise ValueError("no part has a weight: penalties alone teach nothing about success")
        taken = sum(part.penalty or 0.0 for part in self.parts)
        gap, swing = self._gap()
        if taken + swing >= gap:
            behavior = f" and the weights on behavior to {swing:g}" if swing else ""
            raise ValueError(
                f"the penalties add up to {taken:g}{behavior}, so that a success could rank below a failure: keep them "
                f"under {gap:g}" + (", or make behavior a penalty" if swing else " (min_gap)")
            )
        return self

    def _gap(self) -> tuple[float, float]:
        """Return what a success is ahead by in the weighted mean, and what behavior adds to it at most."""
        weights = {
            kind: sum(part.weight or 0.0 for part in self.parts if _is_behavior(part) is kind) for kind in (True, False)
        }
        if not weights[False]:
            return self.min_gap, 0.0  # behavior is all that is asked for
        swing = weights[True] / (weights[True] + weights[False])
        return self.min_gap * (1.0 - swing), swing


def _is_behavior(part: PartSpec) -> bool:
    return isinstance(part.judge, BehaviorSpec)


def _named(value: Any) -> Any:
    """A bare string is the function judge."""
    return {"kind": "function", "function": value} if isinstance(value, str) else value


JudgeSpec = Annotated[
    Annotated[
        FunctionSpec
        | AnswerSpec
        | BehaviorSpec
        | RulerSpec
        | NextStateSpec
        | GraderSpec
        | OpenJudgeSpec
        | FeedbackSpec
        | RewardSpec
        | CompositeSpec,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_named),
]


def gives_only_ranks(judge: JudgeSpec) -> bool:
    """Return whether a judge's scores compare the members of a group and say nothing beyond it."""
    if isinstance(judge, CompositeSpec):
        return all(gives_only_ranks(part.judge) for part in judge.parts if part.weight)
    return isinstance(judge, RulerSpec)


PartSpec.model_rebuild()
CompositeSpec.model_rebuild()

_specs: TypeAdapter[Any] = TypeAdapter(JudgeSpec, config=ConfigDict(hide_input_in_errors=True))


def read_spec(value: Any) -> JudgeSpec:
    """Return the specification in `module:function` or a mapping. Raises pydantic's ValidationError."""
    spec: JudgeSpec = _specs.validate_python(value)
    return spec
