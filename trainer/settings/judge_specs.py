"""Settings of the judges, by kind. Unknown names are errors.

API keys are never settings. They come from the environment: RATCHET_JUDGE_API_KEY for language models,
RATCHET_GRADER_SECRET for HTTP graders, or the variable that `api_key_env` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from ratchet.trainer.errors import JudgeError, PluginError
from ratchet.trainer.settings.learner_settings import Section
from ratchet.trainer.user_code import ENTRY_POINT, JUDGES, load_plugin, missing_plugin_remedy, plugin_names

DROP: Final = "drop"

RUBRIC = """\
- A trajectory that reaches its goal scores far above one that does not, whatever else it does well.
- Of two that reach it, the one with fewer wasted steps scores a little higher.
- Of two that fail, the one that came closer scores a little higher.
- What a trajectory claims counts only as far as its own tool results support it.
- "I do not know" beats a wrong answer."""


def _function(given: str) -> str:
    """Check the form module:function or path/file.py:function. Raises ValueError."""
    if not ENTRY_POINT.fullmatch(given):
        raise ValueError(
            f"{given!r} is not of the form module:function or path/file.py:function, such as my_agent.judge:judge"
        )
    return given


def _checked_url(url: str) -> str:
    """Return an http(s) URL without a slash at its end. Raises ValueError."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:  # a host or port that no client accepts
        valid = False
    if not valid:
        raise ValueError(f"{url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def _models_url(url: str) -> str:
    """Return the URL as AgentScope's clients take it, with /v1. Raises ValueError."""
    return f"{_checked_url(url).removesuffix('/v1')}/v1"


class JudgeSettings(Section):
    """The settings of one judge, built in or of a plug-in. Unknown names are errors."""

    @classmethod
    def of_plugin(cls, name: str, settings: Mapping[str, Any]) -> Self:
        """Return the settings of a plug-in's judge. Raises JudgeError, which names the judge and each wrong setting."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            problems = [
                ": ".join([*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")]) for one in error.errors()
            ]
            raise JudgeError(f"judge {name}: {'; '.join(problems)}") from error


@dataclass(frozen=True, slots=True)
class JudgeTraits:
    """What the settings know about a plug-in's judge: the attribute `traits` of its factory, if it has one.

    asks_model      it asks the language model `model` at `base_url`: `model_list` may have it, and scores have noise
    waits_for       what follows an answer and is judged, such as "the next message": a resample never gets it
    rates_behavior  it scores how a trajectory went, not its answer: a composite never lets it outweigh the answer
    """

    asks_model: bool = False
    waits_for: str = ""
    rates_behavior: bool = False


def plugin_traits(kind: str) -> JudgeTraits:
    """Return the traits of a plug-in's judges by their kind; of a built-in kind, or a missing one, the defaults."""
    try:
        return JudgeTraits() if kind in KINDS else _traits(kind)
    except PluginError:  # what makes the judge says why
        return JudgeTraits()


@cache
def _traits(name: str) -> JudgeTraits:
    found: JudgeTraits = getattr(load_plugin(JUDGES, name), "traits", JudgeTraits())
    return found


class FunctionSpec(JudgeSettings):
    """A Python function."""

    kind: Literal["function"] = "function"
    function: Annotated[str, AfterValidator(_function)] = Field(
        description="the function, as module:function or path/file.py:function"
    )
    concurrency: int = Field(1, ge=1, le=64, description="groups judged at the same time, each in its own thread")
    base_url: Annotated[str, AfterValidator(_models_url)] | None = Field(
        None, description="server of the models that a judge of AgentScope's tuner gets as `auxiliary_models`"
    )
    api_key_env: str = Field(
        "RATCHET_JUDGE_API_KEY", pattern=r"^[A-Z][A-Z0-9_]*$", description="environment variable with its API key"
    )


class AnswerSpec(JudgeSettings):
    """Compares the answer with the correct one of its task: 1 or 0."""

    kind: Literal["answer"]
    answers: Path | None = Field(
        None, description="JSON Lines file with `task` and `answer` (a string or a list of them) per line"
    )
    column: str | None = Field(
        None, description="instead of `answers`: column of the task set that holds the correct answer"
    )
    match: Literal["exact", "contains", "numeric"] = Field("exact", description="how answers are compared")
    max_chars: int = Field(400, ge=1, description="with contains: longer answers score 0, characters")
    tolerance: float = Field(1e-6, ge=0, description="with numeric: largest relative difference that counts as equal")

    @model_validator(mode="after")
    def _has_one_source(self) -> AnswerSpec:
        if (self.answers is None) == (self.column is None):
            raise ValueError("give either `answers`, a file, or `column`, a column of the task set")
        return self


class RewardSpec(JudgeSettings):
    """The reward that a rollout's workflow returned."""

    kind: Literal["workflow"]
    failure_score: float = Field(0.0, description="score of a rollout that failed")


class ModelSpec(JudgeSettings):
    """A language model at any OpenAI-compatible URL."""

    base_url: str = Field(
        description="base URL, with or without /v1; may be this project's own proxy; a model of `model_list` needs none"
    )
    model: str = Field(min_length=1, description="name of the model at that URL, or in `model_list`")
    api_key_env: str | None = Field(
        "RATCHET_JUDGE_API_KEY",
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="environment variable with the API key; null: none; for a model of `model_list`, that of its entry",
    )
    timeout_seconds: float = Field(120.0, gt=0, description="timeout of one request")
    max_attempts: int = Field(
        3, ge=1, le=10, description="attempts to get a valid response; each repeats the question with the error"
    )
    context_tokens: int = Field(
        32_000, ge=512, description="maximum size of the question; longer messages are truncated"
    )
    max_images: int = Field(
        0, ge=0, le=64, description="images sent to a model that accepts images; others are described as text"
    )
    temperature: float | None = Field(None, ge=0, description="sampling temperature; null: the model's default")
    input_cost_per_million: float | None = Field(
        None, ge=0, description="price per million prompt tokens; null: unknown"
    )
    output_cost_per_million: float | None = Field(
        None, ge=0, description="price per million completion tokens; null: unknown"
    )
    concurrency: int = Field(4, ge=1, le=64, description="groups judged at the same time")

    @field_validator("base_url")
    @classmethod
    def _http_url(cls, url: str) -> str:
        return _checked_url(url)


class RulerSpec(ModelSpec):
    """A language model that ranks the members of a group (RULER)."""

    kind: Literal["ruler"]
    rubric: str = Field(RUBRIC, min_length=1, description="the criteria that the model ranks by")


class TeacherSpec(JudgeSettings):
    """A teacher for `learner.loss_type: distillation`: a model behind vLLM that scores the sampled tokens."""

    kind: Literal["teacher"]
    model: str = Field(
        min_length=1, description="name of the teacher in `model_list`; with `base_url`, its name at that URL"
    )
    base_url: Annotated[str, AfterValidator(_checked_url)] | None = Field(
        None, description="URL of the teacher's vLLM, with or without /v1; null: that of `model_list`"
    )
    api_key_env: str | None = Field(
        None,
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="environment variable with the API key; null: that of `model_list`, or no key",
    )
    timeout_seconds: float = Field(120.0, gt=0, description="timeout of one request")
    max_request_tokens: int = Field(
        16_384, ge=1, description="tokens of the sequences in one request; a longer sequence has a request of its own"
    )
    input_cost_per_million: float | None = Field(
        None, ge=0, description="price per million tokens; null: that of `model_list`, or unknown"
    )
    concurrency: int = Field(8, ge=1, le=64, description="trajectories scored at the same time")


class GraderSpec(JudgeSettings):
    """An HTTP service that receives the whole trajectory."""

    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://", description="URL that the trajectory is sent to (POST, JSON)")
    secret_env: str = Field(
        "RATCHET_GRADER_SECRET",
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="environment variable with the secret that signs requests",
    )
    timeout_seconds: float = Field(60.0, gt=0, description="timeout of one request")
    max_attempts: int = Field(3, ge=1, le=10, description="attempts per trajectory, with the same idempotency key")
    concurrency: int = Field(4, ge=1, le=64, description="groups graded at the same time")


class CallerSpec(JudgeSettings):
    """A function of the process that called `ratchet.tune`, which writes this specification for its run."""

    kind: Literal["caller"]
    function: str = Field(description="name of the function")
    version: str = Field(description="hash of its source when the run began")
    address: Path = Field(description="file in which that process keeps its address, readable by its owner only")
    place: str = Field("judge", pattern=r"^[\w.-]+$", description="path of the function at that address")
    max_wait_seconds: float = Field(86_400.0, gt=0, description="wait for it after a trajectory's last call")


class PluginSpec(JudgeSettings):
    """A judge of another package: `kind` is its name, the other keys its settings."""

    kind: Literal["plugin"]
    name: str = Field(description="name of its entry point in the group `ratchet.judges`")
    settings: Mapping[str, Any] = Field(default_factory=dict, description="settings of the plug-in")

    @property
    def traits(self) -> JudgeTraits:
        """What the settings know about it."""
        return plugin_traits(self.name)


class FeedbackSpec(JudgeSettings):
    """Feedback of people or programs about the trajectory."""

    kind: Literal["feedback"]
    within_seconds: float = Field(
        86_400.0, gt=0, description="time after its last call that a trajectory waits for feedback"
    )
    missing: Literal["drop"] | float = Field(
        DROP, description="after that: drop the trajectory, or the score that it gets"
    )
    worst: float = Field(0.0, description="value that scores 0, as do worse values")
    best: float = Field(1.0, description="value that scores 1")

    @model_validator(mode="after")
    def _has_a_scale(self) -> FeedbackSpec:
        if self.worst == self.best:
            raise ValueError("worst and best are equal: every value would score the same")
        if self.missing != DROP and not 0.0 <= float(self.missing) <= 1.0:
            raise ValueError(f"missing {self.missing} is not between 0 and 1, as scores are; or set it to drop")
        return self


class PartSpec(JudgeSettings):
    """One part of a composite: a weighted score, or a penalty."""

    name: str = Field(pattern=r"^\w+$", description="name of the component")
    judge: JudgeSpec = Field(description="the judge of this part")
    weight: float | None = Field(None, gt=0, description="weight of its score")
    penalty: float | None = Field(None, gt=0, description="subtracted at a score of 0, nothing at 1")

    @model_validator(mode="after")
    def _has_weight_or_penalty(self) -> PartSpec:
        if (self.weight is None) == (self.penalty is None):
            raise ValueError(f"part {self.name}: give either weight or penalty")
        return self


class CompositeSpec(JudgeSettings):
    """Several judges: the weighted mean of their scores minus bounded penalties."""

    kind: Literal["composite"]
    parts: tuple[PartSpec, ...] = Field(min_length=1, description="the parts")
    min_gap: float = Field(
        1.0,
        gt=0,
        description="smallest difference between a success and a failure in the weighted mean, without behavior",
    )

    @model_validator(mode="after")
    def _success_ranks_above_failure(self) -> CompositeSpec:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError("two parts have the same name")
        if not any(part.weight for part in self.parts):
            raise ValueError("no part has a weight: penalties alone do not reward success")
        penalties = sum(part.penalty or 0.0 for part in self.parts)
        gap, swing = self._gap()
        if penalties + swing >= gap:
            behavior = f" and the weights on behavior to {swing:g}" if swing else ""
            raise ValueError(
                f"the penalties add up to {penalties:g}{behavior}, so a success could rank below a failure: keep them "
                "under "
                f"{gap:g}" + (", or make behavior a penalty" if swing else " (min_gap)")
            )
        return self

    def _gap(self) -> tuple[float, float]:
        """Return the lead of a success in the weighted mean, and the largest effect of parts on behavior on it."""
        weights = {
            kind: sum(part.weight or 0.0 for part in self.parts if _is_behavior(part) is kind) for kind in (True, False)
        }
        if not weights[False]:
            return self.min_gap, 0.0  # only behavior is scored
        swing = weights[True] / (weights[True] + weights[False])
        return self.min_gap * (1.0 - swing), swing


class ByFamilySpec(JudgeSettings):
    """A judge for each task family."""

    kind: Literal["by_family"]
    judges: dict[str, JudgeSpec] = Field(
        min_length=1,
        description="judge by task family: NAME of `--tasks NAME=SOURCE`, or a task key up to its last slash",
    )
    other: JudgeSpec | None = Field(None, description="judge of all other trajectories; null: they cannot be judged")

    @property
    def all(self) -> tuple[JudgeSpec, ...]:
        return (*self.judges.values(), *(() if self.other is None else (self.other,)))

    @model_validator(mode="after")
    def _has_no_teacher(self) -> ByFamilySpec:
        if any(isinstance(judge, TeacherSpec) for judge in self.all):
            raise ValueError("a teacher scores every family or none: set `kind: teacher` as the judge itself")
        return self


def _is_behavior(part: PartSpec) -> bool:
    return isinstance(part.judge, PluginSpec) and part.judge.traits.rates_behavior


def _full_form(value: Any) -> Any:
    """Read a bare string as a function judge, and a kind that is not built in as a plug-in. Raises ValueError."""
    if isinstance(value, str):
        return {"kind": "function", "function": value}
    if not isinstance(value, Mapping) or not isinstance(kind := value.get("kind"), str) or kind in KINDS:
        return value
    installed = plugin_names(JUDGES)
    if kind not in installed:
        raise ValueError(
            f"unknown kind {kind!r}: built in are {', '.join(KINDS)}; installed plug-ins: "
            f"{', '.join(installed) or 'none'}; {missing_plugin_remedy(JUDGES, kind)}"
        )
    return {"kind": "plugin", "name": kind, "settings": {key: value[key] for key in value if key != "kind"}}


_BuiltIn = (
    FunctionSpec
    | AnswerSpec
    | RulerSpec
    | GraderSpec
    | CallerSpec
    | FeedbackSpec
    | RewardSpec
    | TeacherSpec
    | CompositeSpec
    | ByFamilySpec
    | PluginSpec
)
JudgeSpec = Annotated[Annotated[_BuiltIn, Field(discriminator="kind")], BeforeValidator(_full_form)]
KINDS: Final = tuple(get_args(spec.model_fields["kind"].annotation)[0] for spec in get_args(_BuiltIn))


def gives_only_ranks(judge: JudgeSpec) -> bool:
    """Return whether a judge's scores compare only members of the same group."""
    if isinstance(judge, CompositeSpec):
        return all(gives_only_ranks(part.judge) for part in judge.parts if part.weight)
    if isinstance(judge, ByFamilySpec):
        return any(map(gives_only_ranks, judge.all))
    return isinstance(judge, RulerSpec)


def asks_language_model(judge: JudgeSpec) -> bool:
    """Return whether a judge is known to ask a language model, whose scores of one answer differ between times."""
    if isinstance(judge, CompositeSpec):
        return any(asks_language_model(part.judge) for part in judge.parts if part.weight)
    if isinstance(judge, ByFamilySpec):
        return any(map(asks_language_model, judge.all))
    return isinstance(judge, ModelSpec) or (isinstance(judge, PluginSpec) and judge.traits.asks_model)


PartSpec.model_rebuild()
CompositeSpec.model_rebuild()
ByFamilySpec.model_rebuild()

_specs: TypeAdapter[Any] = TypeAdapter(JudgeSpec, config=ConfigDict(hide_input_in_errors=True))


def read_spec(value: Any) -> JudgeSpec:
    """Return the specification of `module:function` or a mapping. Raises pydantic's ValidationError."""
    spec: JudgeSpec = _specs.validate_python(value)
    return spec
