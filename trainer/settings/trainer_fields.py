"""The fields of the trainer's settings, without the checks across them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from ratchet.store.access.replicas import check_entry
from ratchet.trainer.settings.adapter_settings import AdapterSettings
from ratchet.trainer.settings.estimators import DEFAULT_ESTIMATOR, why_unknown
from ratchet.trainer.settings.judge_specs import JudgeSpec
from ratchet.trainer.settings.learner_process_settings import LearnerProcessSettings
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.release_settings import ReleaseSettings
from ratchet.trainer.settings.resampling_settings import ResamplingSettings
from ratchet.trainer.settings.sentinel_settings import SentinelSettings
from ratchet.trainer.user_code.plugins import MONITORS, missing_plugin_remedy, plugin_names

MAX_SCORES_PER_FAMILY = 512  # newest scores that a baseline uses


def _installed_monitor(name: str) -> str:
    """Check that a monitor is registered. Raises ValueError."""
    installed = plugin_names(MONITORS)
    if name not in installed:
        names, remedy = ", ".join(installed) or "none", missing_plugin_remedy(MONITORS, name)
        raise ValueError(f"unknown monitor {name!r} (installed: {names}): {remedy}")
    return name


class TrainerFields(BaseModel):
    """The fields of the trainer's settings, each valid by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    store: str = Field(description="URL or SQLite path of the store")
    model: str = Field(description="alias that agents request; versions are alias@1, alias@2, ...")
    base_model: str = Field(description="folder or hub name of the base model that vLLM serves")
    vllm: tuple[str, ...] = Field(
        min_length=1, repr=False, description="the vLLM replicas: URLs without /v1, or lists of them"
    )
    checkpoints: Path = Field(description="folder for the checkpoints, one per version; vLLM must be able to read it")
    adapters: AdapterSettings = Field(
        default_factory=AdapterSettings, description="another place for the checkpoints, such as object storage"
    )
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
    no_signal_alarm: int = Field(5, ge=1, description="consecutive groups without variance that raise an alarm")
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
        default_factory=lambda: SentinelSettings(),
        description="checks of the newest trajectories and rounds, and their alarm thresholds",
    )
    resample: ResamplingSettings = Field(
        default_factory=lambda: ResamplingSettings(),
        description="further responses to single-call prompts, sampled while vLLM is idle",
    )
    release: ReleaseSettings = Field(
        default_factory=ReleaseSettings, description="how proven versions become live, and how they are taken back"
    )
    learner: LearnerSettings = Field(default_factory=LearnerSettings, description="how the adapter is trained")
    learner_process: LearnerProcessSettings = Field(
        default_factory=LearnerProcessSettings, description="what the learner of the base model is started with"
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
    def versions(self) -> str:
        """The folder or URL that holds the alias's versions."""
        store = self.adapters.store
        return f"{store}/{self.model}/checkpoints" if store else str(self.checkpoints)
