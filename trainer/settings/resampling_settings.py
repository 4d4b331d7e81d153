"""Settings of resampling, section `trainer.resample`. Off unless `samples` is above 0."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ratchet.trainer.settings.value_types import PlainUrl


class ResamplingSettings(BaseModel):
    """How further responses to single-call prompts are sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

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
    timeout_seconds: float = Field(600.0, gt=0, description="timeout of a resample call")
    proxy_url: PlainUrl | None = Field(
        None, description="proxy for the resample calls, without /v1; null: one that serves the alias"
    )
