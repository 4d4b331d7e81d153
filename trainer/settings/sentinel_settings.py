"""Settings of the sentinel, section `trainer.sentinel`: sample sizes and alarm thresholds."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet.trainer.settings.judge_specs import JudgeSpec


class SentinelSettings(BaseModel):
    """Thresholds; docs/sentinel.md explains them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    interval_seconds: float = Field(30.0, gt=0, description="time between checks")
    window: int = Field(512, ge=32, le=1000, description="newest trajectories that are checked")
    recent_window: int = Field(64, ge=8, description="the newest of those, compared with the others")
    min_sigmas: float = Field(4.0, gt=0, description="standard errors that a change must exceed")
    pause_training: bool = Field(True, description="pause training while a tool fails; false: only raise an alarm")
    tool_window: int = Field(50, ge=10, description="newest results of a tool, compared with its earlier ones")
    max_tool_failure_rate: float = Field(
        0.95,
        gt=0,
        le=1,
        description="alarm if a tool's failure rate is above this, whatever its history",
    )
    max_tool_failure_increase: float = Field(
        0.3, gt=0, le=1, description="alarm if a tool's failure rate rises by more than this over its history"
    )
    length_ratio: float = Field(2.0, gt=1, description="alarm if sampled tokens per trajectory change by this factor")
    reasoning_ratio: float = Field(
        3.0, gt=1, description="alarm if reasoning tokens per tool call or answer change by this factor"
    )
    max_hallucination_increase: float = Field(
        0.2,
        gt=0,
        le=1,
        description="alarm if the share of tool arguments that do not occur in the context rises by more than this",
    )
    max_invalid_call_increase: float = Field(
        0.2, gt=0, le=1, description="alarm if the newest version's share of invalid tool calls is higher by this"
    )
    max_question_increase: float = Field(
        0.2,
        gt=0,
        le=1,
        description="alarm if the newest version's share of answers that ask in place of acting is higher by this",
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
    max_mismatch_nats: float = Field(
        0.1,
        gt=0,
        description="alarm if the mean |trainer - engine| logprob of fresh rows of the last rounds is above this, nats",
    )
    max_untrained_ratio: float = Field(
        0.5, gt=0, le=1, description="alarm if a larger share of the last rounds' sampled tokens is untrained"
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
    min_agreement: float = Field(
        0.2, ge=-1, le=1, description="alarm if Kendall's tau between the judges is below this"
    )

    @model_validator(mode="after")
    def _has_a_past(self) -> Self:
        if 2 * self.recent_window > self.window:
            raise ValueError(
                f"recent_window {self.recent_window} is more than half of window {self.window}: too few are left to "
                "compare with; "
                "lower recent_window or raise window"
            )
        return self
