"""The settings of shadow re-sampling, section `trainer.resample`: off unless `samples` says how many."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ratchet.trainer.settings.urls import PlainUrl


class ResamplingSettings(BaseModel):
    """What the re-sampling of single-call prompts needs to know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    samples: int = Field(
        0,
        ge=0,
        le=63,
        description="further answers to a single-call prompt that found no company; 0: none are asked for",
    )
    calls_per_minute: int = Field(60, ge=1, description="most shadow calls in a minute")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="most tokens of shadow calls in a minute, prompts included; null: no limit"
    )
    concurrency: int = Field(2, ge=1, le=64, description="shadow calls at the same time")
    max_running_requests: int = Field(
        0, ge=0, description="no shadow call begins while vLLM runs more other calls than this, or any waits"
    )
    max_wait_seconds: float = Field(
        300.0,
        gt=0,
        description="a prompt that no idle moment was found for in this time is handled as `ungrouped` says",
    )
    timeout_seconds: float = Field(600.0, gt=0, description="longest shadow call")
    proxy_url: PlainUrl | None = Field(
        None, description="proxy that the shadow calls go through, without /v1; null: one that serves the alias now"
    )
