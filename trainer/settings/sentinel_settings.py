"""The sentinel's settings: how much is looked at, and from where on it is an alarm."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet.trainer.settings.judge_specs import JudgeSpec


class SentinelSettings(BaseModel):
    """Thresholds; their reasons stand in docs/sentinel.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    interval_seconds: float = Field(30.0, gt=0, description="pause between looks")
    window: int = Field(512, ge=32, le=1000, description="newest trajectories that are looked at")
    recent_window: int = Field(64, ge=8, description="the newest of those, held against the others")
    min_sigmas: float = Field(4.0, gt=0, description="standard errors that a change must exceed to count")
    pause_training: bool = Field(
        True, description="whether sick tools hold training back; false: they are only an alarm"
    )
    tool_window: int = Field(50, ge=10, description="newest results of a tool, held against its earlier ones")
    max_tool_failure_rate: float = Field(
        0.95,
        gt=0,
        le=1,
        description="share of a tool's newest calls that fail from which it is sick, whatever its past",
    )
    max_tool_failure_increase: float = Field(
        0.3, gt=0, le=1, description="rise of that share over the tool's own past from which it is sick"
    )
    length_ratio: float = Field(2.0, gt=1, description="growth or fall of sampled tokens per trajectory that is drift")
    reasoning_ratio: float = Field(3.0, gt=1, description="growth or fall of reasoning tokens per action that is drift")
    max_hallucination_increase: float = Field(
        0.2, gt=0, le=1, description="rise of the share of tool arguments that occur nowhere in their context"
    )
    min_coverage: float = Field(
        0.01,
        ge=0,
        le=1,
        description="a tool is neglected below this share of the trajectories that could use it; 0: off",
    )
    min_resource_coverage: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of shown files, addresses and ids that tool calls name, below which it is an alarm; 0: off",
    )
    max_mismatch_nats: float = Field(
        0.1, gt=0, description="mean |trainer - engine| logprob of the last rounds that is a mismatch, nats"
    )
    max_untrained_ratio: float = Field(
        0.5, gt=0, le=1, description="share of sampled tokens that the last rounds could not train"
    )

    second_judge: JudgeSpec | None = Field(
        None, description="asked about a sample of the groups and compared with the first; its scores never count"
    )
    block_release: bool = Field(
        True, description="whether a second judge that disagrees holds promotion; false: it is only an alarm"
    )
    second_judge_sample_rate: float = Field(0.1, gt=0, le=1, description="share of the groups that it is asked about")
    min_agreement: float = Field(
        0.2, ge=-1, le=1, description="Kendall's tau between the two judges below which it is an alarm"
    )

    @model_validator(mode="after")
    def _something_to_compare_with(self) -> Self:
        if 2 * self.recent_window > self.window:
            raise ValueError(
                f"recent_window {self.recent_window} is more than half of window {self.window}: "
                "nothing is left to compare with; lower recent_window or raise window"
            )
        return self
