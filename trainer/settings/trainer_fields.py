"""The fields of the trainer's settings, without the checks across them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ratchet.store.access.url_credentials import plain_url
from ratchet.trainer.observability.monitors.monitor_thread import MonitorName
from ratchet.trainer.settings.devices import Devices
from ratchet.trainer.settings.judge_specs import JudgeSpec
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.release_settings import ReleaseSettings
from ratchet.trainer.settings.resampling_settings import ResamplingSettings
from ratchet.trainer.settings.sentinel_settings import SentinelSettings

MAX_SCORES_PER_FAMILY = 512  # scores of a family
_LEARNER_FIELDS = {field.name for field in dataclasses.fields(LearnerSettings)}


class TrainerFields(BaseModel):
    """The trainer's settings, each sound by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    store: str = Field(description="URL or SQLite path of the store")
    model: str = Field(description="alias that agents ask for; versions are alias@1, alias@2, ...")
    base_model: str = Field(description="folder or hub name of the base model, the one that vLLM serves")
    vllm: tuple[str, ...] = Field(min_length=1, repr=False, description="base URL of every vLLM replica, without /v1")
    checkpoints: Path = Field(description="folder that gets one folder per version; vLLM must be able to read it")
    judge: JudgeSpec = Field(description="the judge: module:function, or a mapping with `kind` (docs/judges.md)")
    judge_attempts: int = Field(5, ge=1, description="tries before what has no score is dropped as judge_failed")
    judge_retry_seconds: float = Field(
        5.0, ge=0, description="pause before a failed judge is asked again; it grows fourfold"
    )
    seal_after_idle_seconds: float = Field(60.0, gt=0, description="a trajectory this still is complete")
    num_generations: int = Field(8, ge=2, description="attempts at one task that are compared with each other")
    min_group_size: int = Field(2, ge=2, description="smallest group that is worth comparing")
    group_wait_seconds: float = Field(
        300.0,
        gt=0,
        description="a smaller group is formed after this long; attempts under way are waited for this long and four "
        "times the longest complete one's time",
    )
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce++"] = Field(
        "grpo", description="how scores become advantages: grpo, dr_grpo (no division), rloo or reinforce++"
    )
    turn_weight: float = Field(
        0.0, ge=0, description="weight of what a judge says of single calls (components turn:1, turn:2, ...); 0: none"
    )
    mask_truncated_completions: bool = Field(
        True, description="answers that were cut off at their longest (finish reason `length`) carry no loss"
    )
    roles: tuple[str, ...] = Field((), description="roles of a multi-agent system that train; empty: all")
    role_patterns: dict[str, str] = Field(
        default_factory=dict,
        description="pattern in the system prompt by role, for calls without x-ratchet-role; the first that fits",
    )
    scale_advantages_by_family: bool = Field(
        False, description="scale the advantages of each task family to the same spread"
    )
    ungrouped: Literal["drop", "baseline", "cohort"] = Field(
        "drop",
        description="what has no company: drop it, compare it with its task family's past (baseline), or, while that "
        "is too short, with others of the same system prompt and tools (cohort)",
    )
    min_baseline_samples: int = Field(16, ge=2, description="earlier scores of a task family that make a baseline")
    groups_per_round: int = Field(16, ge=1, description="groups with a learning signal that start a round")
    round_wait_seconds: float = Field(600.0, gt=0, description="a round starts with fewer groups after this long")
    min_groups_per_round: int = Field(
        1, ge=1, description="but never with fewer than this; a single counts 1 / num_generations of a group"
    )
    max_staleness: int = Field(8, ge=0, description="groups sampled more versions ago than this are dropped")
    no_signal_alarm: int = Field(5, ge=1, description="groups in a row without variance that raise an alarm")
    proof_tolerance: float = Field(
        0.1, gt=0, description="mean |served - trainer| logprob, nats, beyond which a swap is refused"
    )
    keep_loaded_adapters: int = Field(2, ge=0, description="retired versions that stay loaded in vLLM")
    keep_checkpoints: int = Field(
        8, ge=1, description="newest versions that stay on disk, beside the live and best ones"
    )
    keep_optimizer_states: int = Field(
        2, ge=1, description="newest, and best, versions that keep their optimiser state on disk"
    )
    lease_seconds: float = Field(30.0, gt=0, description="another trainer takes over this long after this one died")
    poll_interval_seconds: float = Field(
        0.25, gt=0, description="pause between looks at the store when there is no work"
    )
    devices: Devices = Field(
        None, description="GPUs that the trainer sees: 0, or 0,1, or UUIDs; null: as CUDA_VISIBLE_DEVICES says"
    )
    num_processes: int = Field(1, ge=1, description="processes that train together, as accelerate launch starts them")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of the trainer's own /metrics; 0 takes any free one; null: none"
    )
    metrics_host: str = Field("127.0.0.1", description="address that the trainer's /metrics listens on")
    log_format: Literal["text", "json"] = Field(
        "text", description="`text`: logfmt after time and level; `json`: one object per line"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lines below it are left out; that the trainer is ready is told in any case"
    )
    report_to: tuple[MonitorName, ...] = Field(
        (), description="who else is told of rounds and decisions: tensorboard, wandb; off the trainer's path"
    )
    sentinel: SentinelSettings = Field(
        default_factory=lambda: SentinelSettings(), description="what is watched, and from where on it is an alarm"
    )
    resample: ResamplingSettings = Field(
        default_factory=lambda: ResamplingSettings(),
        description="further answers to single-call prompts, off users' path",
    )
    release: ReleaseSettings = Field(default_factory=ReleaseSettings, description="what a proven version must show")
    learner: LearnerSettings = Field(default_factory=LearnerSettings, description="the LoRA learner")

    @field_validator("learner", mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in _LEARNER_FIELDS:
                    raise ValueError(f"unknown setting {name}; known: {', '.join(sorted(_LEARNER_FIELDS))}")
        return value

    @field_validator("num_generations", "min_group_size", mode="before")
    @classmethod
    def _more_than_one(cls, value: Any) -> Any:
        if value == 1:
            raise ValueError(
                "1 member has nothing to be compared with, so that every advantage would be 0: take 2 or more; for "
                "traffic where nobody tries a task twice set ungrouped: baseline"
            )
        return value

    @field_validator("role_patterns")
    @classmethod
    def _are_patterns(cls, prompts: dict[str, str]) -> dict[str, str]:
        for role, pattern in prompts.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the pattern of role {role} is no regular expression: {error}") from error
        return prompts

    @field_validator("vllm")
    @classmethod
    def _plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(plain_url(url) for url in urls)
