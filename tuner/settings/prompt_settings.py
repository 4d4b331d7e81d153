"""The settings of prompt tuning: section `tuner.prompt` of ratchet.yaml."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

MIN_TRAIN_TASKS: Final = 3
MIN_VALIDATION_TASKS: Final = 3
MIN_HELD_OUT_TASKS: Final = 6  # with fewer pairs no difference is significant at 95%
SEARCH_ROLLOUTS: Final = 300  # of the search, if max_rollouts is null


class PromptSettings(BaseModel):
    """How a system prompt is searched for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    method: str = Field("gepa", description="optimizer: gepa (extra tune-gepa) or the name of a plug-in, such as mipro")
    mode: Literal["auto", "replace", "append"] = Field(
        "auto",
        description="the prompt replaces the agent's system prompt or is appended to it; auto: append if the agent's "
        "own prompt differs between tasks",
    )
    max_rollouts: int | None = Field(
        None,
        ge=1,
        description="hard limit of all rollouts, those on held-out tasks included; null: "
        f"{SEARCH_ROLLOUTS} for the search, plus those on held-out tasks",
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="hard limit of tokens, of the agent and of the reflection model together; null: none"
    )
    train_tasks: int = Field(
        40, ge=MIN_TRAIN_TASKS, description="maximum number of tasks whose rollouts the reflection model reads"
    )
    validation_tasks: int = Field(
        40, ge=MIN_VALIDATION_TASKS, description="maximum number of tasks that rank the proposed prompts"
    )
    held_out_tasks: int | None = Field(
        None,
        ge=MIN_HELD_OUT_TASKS,
        description="maximum number of tasks of the final comparison, from the start of the test split; null: the "
        "whole test split, or, without one, half of the tasks and at most 100",
    )
    reflection_minibatch_size: int = Field(3, ge=1, le=20, description="rollouts that one reflection reads")
    max_prompt_chars: int = Field(20_000, ge=100, le=100_000, description="maximum length of a prompt, in characters")
