"""The trainer's settings and their sections, with the checks across fields. Unknown names are errors. Imports no torch.

Settings that are valid one by one but can never train anything are refused with the reason and the remedy. Problems
that depend on traffic (greedy responses, a judge that gives equal scores) raise an alarm instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ratchet.store.access.replicas import check_entry
from ratchet.trainer.settings.judge_specs import (
    ByFamilySpec,
    CompositeSpec,
    FeedbackSpec,
    FunctionSpec,
    JudgeSpec,
    PluginSpec,
    TeacherSpec,
    gives_only_ranks,
)
from ratchet.trainer.settings.learner_settings import (
    AUTO,
    CheckedByPydantic,
    LearnerProcessSettings,
    LearnerSettings,
    PlainUrl,
    Section,
)
from ratchet.trainer.settings.objectives import DEFAULT_ESTIMATOR, why_unknown
from ratchet.trainer.user_code import MONITORS, missing_plugin_remedy, plugin_names

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<place>[^/]*)")


class AdapterSettings(Section):
    """Where the adapters and the learner's states are kept."""

    store: str | None = Field(
        None,
        description="folder, `s3://bucket/prefix` or `gs://bucket/prefix` of the versions; null: the state folder "
        "([storage.md](storage.md))",
    )
    quorum: int | None = Field(
        None, ge=1, description="replicas that must serve a new version; null: all of one or two, else all but one"
    )
    max_cache_gb: float = Field(
        20.0, gt=0, description="size of the local copies of versions in object storage, GB; more than vLLM has loaded"
    )

    @field_validator("store")
    @classmethod
    def _place(cls, store: str | None) -> str | None:
        if not store:
            return None
        url = _URL.match(store)
        if url is None:
            return str(Path(store).expanduser().absolute())
        if url["protocol"] == "file":
            return str(Path(store.removeprefix("file://")).absolute())
        if "@" in url["place"]:
            raise ValueError("the URL holds credentials: give them by variable, such as AWS_ACCESS_KEY_ID")
        if not url["place"]:
            raise ValueError(f"{store} names no bucket; write it like s3://bucket/prefix")
        return store.rstrip("/")

    @property
    def max_cache_bytes(self) -> int:
        """The size of the local copies in bytes."""
        return int(self.max_cache_gb * 1e9)

    @property
    def is_remote(self) -> bool:
        """Whether the store is object storage."""
        return self.store is not None and "://" in self.store


class ReleaseSettings(Section):
    """How a proven version becomes live, and how it is taken back."""

    policy: Literal["guarded", "immediate"] = Field(
        "guarded",
        description="guarded: a proven version serves beside the live one first, and is rolled back on evidence of "
        "harm; immediate: it becomes live at once, unprotected. Unless it is set, versions are released immediately "
        "while a run of `ratchet tune weights` trains the agent",
    )
    holdback: float = Field(
        0.1, gt=0, le=0.3, description="share of new trajectories that stay on the anchor; 0.3 while in doubt"
    )
    ramp: int | None = Field(
        None,
        ge=16,
        le=100_000,
        description="scored trajectories of a ramp, of all versions; null: 256, or half a round if that is more",
    )
    alpha: float = Field(
        0.001, gt=0, lt=0.05, description="highest probability that a version as good as those before it is rolled back"
    )
    deadline_seconds: float = Field(
        21600.0,
        gt=0,
        description="longest wait, after its start, for a trajectory's end and its score; unfinished, it counts as the "
        "worst. An open one is waited for ten times the usual duration, at least 15 minutes",
    )
    max_gain: float | None = Field(0.5, gt=0, description="a larger gain needs a person's approval; null: no limit")
    invariant_prompts: int = Field(
        64, ge=0, description="recent prompts that both versions answer before a candidate serves anybody; 0: none"
    )
    held_out_share: float = Field(0.0, ge=0, le=0.5, description="share of tasks that are held out for evaluation")
    evaluation_prompts: int = Field(32, ge=5, description="held-out prompts or tasks that a candidate is evaluated on")
    evaluation_samples: int = Field(4, ge=1, description="responses of each version per prompt, or attempts per task")
    workflow: str | None = Field(
        None, description="workflow that runs held-out tasks with both versions, as tuner.workflow; null: none"
    )
    tasks: str | None = Field(
        None, description="task set of the workflow: an imported name, a folder, a file or a hub name"
    )
    split: str = Field("test", description="split of that task set")
    proxy_url: str | None = Field(
        None, description="proxy for the workflow's calls, without /v1; null: one that serves the alias"
    )
    evaluation_concurrency: int = Field(8, ge=1, le=1024, description="concurrent rollouts of the evaluation")
    second_judge: JudgeSpec | None = Field(
        None,
        description="judge that must confirm the end of a ramp, else approval is required; null: the sentinel's",
    )

    @model_validator(mode="after")
    def _is_decidable(self) -> Self:
        if (self.workflow is None) != (self.tasks is None):
            raise ValueError("set workflow and tasks together: the workflow and its task set")
        return self


class ResamplingSettings(Section):
    """How further responses to single-call prompts are sampled."""

    samples: int = Field(
        0,
        ge=0,
        le=63,
        description="further responses to a single-call prompt that is in no group; 0: off",
    )
    calls_per_minute: int = Field(60, ge=1, description="maximum resample calls per minute")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="maximum tokens of resample calls per minute, prompts included; null: no limit"
    )
    concurrency: int = Field(2, ge=1, le=64, description="concurrent resample calls")
    max_running_requests: int = Field(
        0, ge=0, description="a resample call starts only while vLLM runs at most this many other calls and none waits"
    )
    max_wait_seconds: float = Field(
        300.0,
        gt=0,
        description="time to find an idle moment for a prompt; then its trajectory is handled as `ungrouped` says",
    )
    proxy_url: PlainUrl | None = Field(
        None, description="proxy for the resample calls, without /v1; null: one that serves the alias"
    )


class SentinelSettings(Section):
    """Thresholds; docs/sentinel.md explains them."""

    interval_seconds: float = Field(30.0, gt=0, description="time between checks")
    pause_training: bool = Field(True, description="pause training while a tool fails; false: only raise an alarm")
    max_tool_failure_rate: float = Field(
        0.95,
        gt=0,
        le=1,
        description="alarm if a tool's failure rate is above this, whatever its history",
    )
    min_coverage: float = Field(
        0.01,
        ge=0,
        le=1,
        description="alarm if a smaller share of the trajectories that are offered a tool use it; 0: off",
    )
    min_resource_coverage: float = Field(
        0.1,
        ge=0,
        le=1,
        description="alarm if tool calls name a smaller share of the files, URLs and ids in context; 0: off",
    )

    second_judge: JudgeSpec | None = Field(
        None, description="judge of a sample of the groups, compared with the first; its scores are not trained on"
    )
    block_release: bool = Field(
        True, description="require approval for releases while the second judge disagrees; false: only raise an alarm"
    )
    second_judge_sample_rate: float = Field(
        0.1, gt=0, le=1, description="share of the groups that the second judge scores"
    )


POLICY, DEMONSTRATIONS = "policy", "demonstrations"  # all other source names are models


class WarmStartSettings(Section):
    """The data and the hyperparameters of a warm start."""

    sources: tuple[str, ...] = Field(
        (POLICY, DEMONSTRATIONS),
        min_length=1,
        description="policy: the policy's own trajectories with a good score; demonstrations: demonstrations from "
        "feedback; "
        "any other name: recorded trajectories of that model",
    )
    min_score: float = Field(0.5, description="minimum score of a trajectory")
    min_trajectories: int = Field(
        16, ge=1, description="minimum number of trajectories; with fewer the warm start is refused"
    )
    max_per_source: int = Field(
        2000, ge=1, description="number of newest trajectories of each source that are considered"
    )
    max_per_task: int = Field(4, ge=1, description="number of best trajectories per task that are used")
    general: str | None = Field(
        None, description="general chat data that is mixed in: a task set with a column `messages` (and `tools`)"
    )
    general_split: str = Field("train", description="split of the general data")
    general_ratio: float = Field(0.2, ge=0, lt=1, description="share of general conversations in the training data")
    general_held_out: int = Field(
        64, ge=1, description="general conversations that measure the loss and are not trained"
    )
    max_loss_increase: float | None = Field(
        None, gt=0, description="largest rise of the held-out general loss, nats per token; null: no limit"
    )
    num_train_epochs: int = Field(2, ge=1, description="number of passes over the data")
    batch_size: int = Field(32, ge=1, description="rows per optimizer step")
    learning_rate: float | None = Field(None, gt=0, description="learning rate of AdamW; null: the learner's")
    seed: int = Field(0, description="seed of the data mixture")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"a source is listed twice: {', '.join(self.sources)}")
        if self.max_loss_increase is not None and self.general is None:
            raise ValueError("max_loss_increase is measured on general data: set `general` as well")
        return self


NO_JUDGE = "unset:unset"  # in place of a judge while none is set
MAX_SCORES_PER_FAMILY = 512  # newest scores that a baseline uses
_MIN_NORM = 1e-6  # a smaller gradient is lost in AdamW's epsilon of 1e-8
_MIN_RATE = 1e-9  # a smaller step does not change an fp32 weight of 0.01
_MIN_CLIP = 1e-4  # the ratio of any trained token differs more from 1
_MIN_TOLERANCE = 1e-5  # nats; two engines never agree to more digits


def _installed_monitor(name: str) -> str:
    """Check that a monitor is registered. Raises ValueError."""
    installed = plugin_names(MONITORS)
    if name not in installed:
        names, remedy = ", ".join(installed) or "none", missing_plugin_remedy(MONITORS, name)
        raise ValueError(f"unknown monitor {name!r} (installed: {names}): {remedy}")
    return name


class TrainerSettings(Section):
    """The settings of one trainer. Settings that cannot train anything are refused with the reason.

    No user sets the fields with `exclude`: they follow from the project's other settings.
    """

    store: str = Field(exclude=True, description="URL or SQLite path of the store")
    model: str = Field(exclude=True, description="alias that agents request; versions are alias@1, alias@2, ...")
    base_model: str = Field(exclude=True, description="folder or hub name of the base model that vLLM serves")
    vllm: tuple[str, ...] = Field(
        min_length=1, repr=False, exclude=True, description="the vLLM replicas: URLs without /v1, or lists of them"
    )
    checkpoints: Path = Field(exclude=True, description="folder of the versions, which vLLM can read")
    adapters: AdapterSettings = Field(default_factory=AdapterSettings, exclude=True)
    judge: JudgeSpec = Field(description="the judge: module:function, or a mapping with `kind` (docs/judges.md)")
    share: float = Field(1.0, gt=0, description="share of the learner's time, relative to the other agents' shares")
    judge_attempts: int = Field(
        5, ge=1, description="attempts of the judge before a trajectory without a score is dropped as judge_failed"
    )
    judge_retry_seconds: float = Field(
        5.0, ge=0, description="wait before a failed judge is called again; it grows fourfold"
    )
    seal_after_idle_seconds: float = Field(
        60.0, gt=0, description="time without calls after which a trajectory is complete"
    )
    num_generations: int = Field(8, ge=2, description="attempts at one task that form a group")
    min_group_size: int = Field(2, ge=2, description="smallest group that is trained")
    group_wait_seconds: float = Field(
        300.0,
        gt=0,
        description="wait before a group smaller than num_generations is formed; it also waits for running attempts, "
        "this long plus four times the duration of the longest complete one",
    )
    advantage_estimator: str = Field(
        DEFAULT_ESTIMATOR,
        description="how scores become advantages: dr_grpo (less the group's mean), rloo, grpo (also divided by the "
        "group's standard deviation), reinforce++, or a plug-in's (docs/plugins.md)",
    )
    judge_noise: float | None = Field(
        None,
        ge=0,
        description="standard deviation of the judge's scores of one and the same answer: groups whose spread it "
        "explains are not trained; null: what `ratchet judge calibrate` measured, until then 0.02 for judges that ask "
        "a language model and 0 for others",
    )
    turn_weight: float = Field(
        0.0, ge=0, description="weight of the judge's scores of single calls (components turn:1, turn:2, ...); 0: none"
    )
    mask_truncated_completions: bool = Field(
        True, description="mask responses that reached their maximum length (finish reason `length`)"
    )
    train_penalized: bool = Field(
        False,
        description="train responses sampled with penalties, logit_bias or min_tokens, without importance weights: "
        "their logprobs belong to a distribution that the learner does not compute",
    )
    roles: tuple[str, ...] = Field((), description="roles of a multi-agent system that are trained; empty: all")
    role_patterns: dict[str, str] = Field(
        default_factory=dict,
        description="regular expression of the system prompt by role, for calls without x-ratchet-role; the first "
        "match counts",
    )
    scale_advantages_by_family: bool = Field(
        False, description="scale the advantages of each task family to the same spread"
    )
    ungrouped: Literal["drop", "baseline", "cohort"] = Field(
        "drop",
        description="trajectories without a group: drop; baseline: compare with past scores of the task family; "
        "cohort: as baseline, and while there are too few scores, with others of the same system prompt and tools",
    )
    min_baseline_samples: int = Field(16, ge=2, description="minimum past scores of a task family for a baseline")
    groups_per_round: int = Field(16, ge=1, description="groups with a learning signal in a round")
    round_wait_seconds: float = Field(600.0, gt=0, description="time after which a round starts with fewer groups")
    min_groups_per_round: int = Field(
        1, ge=1, description="minimum groups in a round; an ungrouped trajectory counts as 1 / num_generations"
    )
    max_staleness: int = Field(4, ge=0, description="versions after which a group is too old to train and is dropped")
    proof_tolerance: float = Field(
        0.1,
        gt=0,
        description="largest mean |served - trainer| logprob of a new version, nats; otherwise it is rejected",
    )
    keep_loaded_adapters: int = Field(2, ge=0, description="retired versions that stay loaded in vLLM")
    keep_checkpoints: int = Field(
        8, ge=1, description="newest versions kept on disk, in addition to the live and best ones"
    )
    keep_optimizer_states: int = Field(
        2, ge=1, description="newest, and best, versions whose optimizer state is kept on disk"
    )
    lease_seconds: float = Field(
        30.0, gt=0, description="time after which another trainer takes over from one that died"
    )
    poll_interval_seconds: float = Field(
        0.25, gt=0, description="wait between looks into the store; one query looks for all agents"
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of the trainer's /metrics; 0: any free port; null: none"
    )
    metrics_host: str = Field("127.0.0.1", description="listen address of the trainer's /metrics")
    log_format: Literal["text", "json"] = Field(
        "text", description="`text`: logfmt after time and level; `json`: one object per line"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="minimum level of log lines; readiness is always logged"
    )
    report_to: tuple[Annotated[str, AfterValidator(_installed_monitor)], ...] = Field(
        (), description="monitors that receive rounds and decisions: plug-ins, such as tensorboard and wandb"
    )
    sentinel: SentinelSettings = Field(
        default_factory=SentinelSettings,
        description="checks of the newest trajectories and rounds, and their alarm thresholds",
    )
    resample: ResamplingSettings = Field(
        default_factory=ResamplingSettings,
        description="further responses to single-call prompts, sampled while vLLM is idle",
    )
    release: ReleaseSettings = Field(
        default_factory=ReleaseSettings, description="how proven versions become live, and how they are taken back"
    )
    learner: Annotated[LearnerSettings, CheckedByPydantic] = Field(default_factory=LearnerSettings, exclude=True)
    learner_process: Annotated[LearnerProcessSettings, CheckedByPydantic] = Field(
        default_factory=LearnerProcessSettings, exclude=True
    )

    @field_validator("advantage_estimator")
    @classmethod
    def _estimator_is_known(cls, name: str) -> str:
        reason = why_unknown(name)
        if reason is not None:
            raise ValueError(reason)
        return name

    @field_validator("num_generations", "min_group_size", mode="before")
    @classmethod
    def _is_a_group(cls, value: Any) -> Any:
        if value == 1:
            raise ValueError(
                "a group of 1 has nothing to compare, so every advantage would be 0: use 2 or more; if your traffic "
                "never repeats a task, set ungrouped: baseline"
            )
        return value

    @field_validator("role_patterns")
    @classmethod
    def _compile(cls, prompts: dict[str, str]) -> dict[str, str]:
        for role, pattern in prompts.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the pattern of role {role} is not a regular expression: {error}") from error
        return prompts

    @field_validator("vllm")
    @classmethod
    def _replicas(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_entry, entries))

    @property
    def has_judge(self) -> bool:
        """Whether a judge is set."""
        return self.judge != FunctionSpec(function=NO_JUDGE)

    @property
    def versions(self) -> str:
        """The folder or URL that holds the alias's versions."""
        store = self.adapters.store
        return f"{store}/{self.model}/checkpoints" if store else str(self.checkpoints)

    @model_validator(mode="after")
    def _is_trainable(self) -> Self:
        for reason in _untrainable(self):
            raise ValueError(reason)
        if self.keep_checkpoints <= self.keep_loaded_adapters:
            raise ValueError(
                f"keep_checkpoints {self.keep_checkpoints} must be more than keep_loaded_adapters "
                f"{self.keep_loaded_adapters}: vLLM reads the folder of what it has loaded"
            )
        return self


def _untrainable(settings: TrainerSettings) -> Iterator[str]:
    """Yield why nothing can be trained, with the remedy."""
    yield from _group_problems(settings)
    yield from _learner_problems(settings.learner)
    yield from _loss_problems(settings)
    if settings.learner.objective.distillation:
        yield from _distillation_problems(settings)


def _group_problems(own: TrainerSettings) -> Iterator[str]:
    if own.min_group_size > own.num_generations:
        yield (
            f"min_group_size {own.min_group_size} is more than num_generations {own.num_generations}: lower it, or no "
            "smaller group is ever compared"
        )
    if own.min_groups_per_round > own.groups_per_round:
        yield (
            f"min_groups_per_round {own.min_groups_per_round} is more than groups_per_round {own.groups_per_round}: "
            "lower it, or raise groups_per_round"
        )
    if own.ungrouped != "drop" and own.min_baseline_samples > MAX_SCORES_PER_FAMILY:
        yield (
            f"min_baseline_samples {own.min_baseline_samples} is more than the {MAX_SCORES_PER_FAMILY} scores kept per "
            "task family: no ungrouped trajectory would ever have a baseline; lower it, 16 is usual"
        )
    if own.ungrouped != "drop" and gives_only_ranks(own.judge):
        yield (
            f"ungrouped: {own.ungrouped} compares scores of different times and tasks, but the judge only ranks the "
            "members of one group; use a judge that scores each response by itself, or ungrouped: drop with "
            "resample.samples to train on single-call prompts (docs/ungrouped.md)"
        )
    if 0 < own.resample.samples < own.min_group_size - 1:
        yield (
            f"resample.samples {own.resample.samples} and the original are fewer than min_group_size "
            f"{own.min_group_size}: they would never be compared; set resample.samples to {own.min_group_size - 1} or "
            "more"
        )
    if own.resample.samples and (missing := _feedback_without_reader(own.judge)):
        yield (
            f"resample.samples samples responses that no user sees, and {missing}: they can never be scored; use a "
            "judge that reads the response itself, or resample.samples: 0"
        )
    if own.proof_tolerance < _MIN_TOLERANCE:
        yield (
            f"proof_tolerance {own.proof_tolerance:g} is smaller than the rounding of two engines: every version would "
            "be rejected; 0.01 to 0.2 is usual"
        )


def _feedback_without_reader(judge: JudgeSpec) -> str | None:
    """Return what a judge waits for that no resample can get; None if it reads the response itself."""
    if isinstance(judge, CompositeSpec):
        return next(
            (missing for part in judge.parts if part.weight and (missing := _feedback_without_reader(part.judge))), None
        )
    if isinstance(judge, ByFamilySpec):
        return next((missing for one in judge.all if (missing := _feedback_without_reader(one))), None)
    if isinstance(judge, FeedbackSpec):
        return "judge feedback waits for feedback"
    if isinstance(judge, PluginSpec) and (awaited := judge.traits.waits_for):
        return f"judge {judge.name} waits for {awaited}"
    return None


def _learner_problems(own: LearnerSettings) -> Iterator[str]:
    rate, width = own.learning_rate, max(own.clip)
    if not isinstance(rate, str) and rate < _MIN_RATE:
        yield f"learner.learning_rate {rate:g} is too small to change an fp32 weight; use auto, or 1e-6 to 1e-4"
    if own.target_kl is not None and (rate != AUTO or own.loss_type == "sft"):
        yield (
            f"learner.target_kl has no effect with learning_rate {rate} and loss {own.loss_type}: it controls "
            "learning_rate auto, and sft has a fixed rate; leave it out, or set learning_rate: auto"
        )
    if 0 < own.max_grad_norm < _MIN_NORM:
        yield (
            f"learner.max_grad_norm {own.max_grad_norm:g} scales every gradient below AdamW's epsilon; 1.0 is usual, 0 "
            "sets no limit"
        )
    by_token = own.objective.shape == "clip" and own.objective.ratio == "token"
    if own.steps_per_round > 1 and by_token and width < _MIN_CLIP:
        yield (
            f"learner.epsilon and epsilon_high of at most {width:g} clip every token after the first of "
            f"{own.steps_per_round} steps; 0.2 and 0.28 are usual"
        )


def _loss_problems(own: TrainerSettings) -> Iterator[str]:
    learner, objective, loss = own.learner, own.learner.objective, own.learner.loss_type
    if objective.preference and objective.preference.of_groups and own.ungrouped != "drop":
        yield (
            f"learner.loss_type {loss} compares responses of a group, and ungrouped: {own.ungrouped} has only one "
            "response to a prompt: use loss_type apo_zero_unpaired, or ungrouped: drop with resample.samples to train "
            "on single-call prompts"
        )
    if own.turn_weight and objective.preference:
        yield f"turn_weight has no effect with loss {loss}, which compares whole answers: set it to 0"
    used = {
        "epsilon": objective.ratio != "none" and objective.shape == "clip",
        "epsilon_high": objective.ratio != "none",
        "top_entropy_quantile": objective.ratio != "none",
        "dr_grpo_length": objective.mean == "length",
        "preference_beta": objective.preference is not None,
    }
    defaults = LearnerSettings()
    for name in used:
        if not used[name] and getattr(learner, name) != getattr(defaults, name):
            yield f"learner.{name} has no effect with loss {loss}: leave it out, or use a loss that has it"
    is_taught = isinstance(own.judge, TeacherSpec)
    if objective.distillation and not is_taught:
        yield (
            f"learner.loss_type {loss} learns from a teacher's logprobs, and the judge is none: set trainer.judge to "
            "{kind: teacher, model: NAME}, a name of model_list, or choose another loss_type"
        )
    if is_taught and not objective.distillation:
        yield (
            f"the judge is a teacher, which says nothing that loss_type {loss} learns from: set learner.loss_type to "
            "distillation, or choose another judge"
        )


def _distillation_problems(own: TrainerSettings) -> Iterator[str]:
    if own.release.held_out_share and own.release.workflow is None:
        yield (
            "release.held_out_share compares answers that have no token ids, which a teacher cannot score: set "
            "release.workflow and release.tasks, or leave it out"
        )
    compared = {
        "ungrouped": own.ungrouped != "drop",
        "resample.samples": own.resample.samples > 0,
        "turn_weight": own.turn_weight > 0,
        "advantage_estimator": own.advantage_estimator != DEFAULT_ESTIMATOR,
        "scale_advantages_by_family": own.scale_advantages_by_family,
    }
    for name in compared:
        if compared[name]:
            yield (
                f"{name} has no effect with loss_type {own.learner.loss_type}: each trajectory is trained by itself, "
                "and no scores are compared; leave it out"
            )
