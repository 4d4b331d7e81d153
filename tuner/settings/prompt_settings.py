"""The settings of prompt tuning, section `tuner.prompt` of ratchet.yaml."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

MIN_TRAIN_TASKS: Final = 3
MIN_VALIDATION_TASKS: Final = 3
MIN_HELD_OUT_TASKS: Final = 6  # with fewer pairs no difference can be told from chance at 95%
SEARCH_ROLLOUTS: Final = 300  # of a search that no number is given for


class PromptSettings(BaseModel):
    """How a system prompt is searched for."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    method: str = Field(
        "gepa", description="optimizer: gepa (extra tune-gepa), mipro (extra tune-mipro) or a plug-in's name"
    )
    mode: Literal["auto", "replace", "append"] = Field(
        "auto",
        description="the prompt replaces the agent's system prompt or is appended to it; auto: appended where the "
        "agent's own differs from task to task",
    )
    rollouts: int | None = Field(
        None,
        ge=1,
        description="rollouts in all, those on the held-out tasks among them; a hard limit; null: "
        f"{SEARCH_ROLLOUTS}, and beside them what the held-out tasks need",
    )
    tokens: int | None = Field(
        None, ge=1, description="tokens in all, the agent's and the reflection model's; a hard limit; null: none"
    )
    train: int = Field(40, ge=MIN_TRAIN_TASKS, description="most tasks that the reflection model is shown rollouts of")
    validation: int = Field(40, ge=MIN_VALIDATION_TASKS, description="most tasks that proposed prompts are ranked by")
    held_out: int | None = Field(
        None,
        ge=MIN_HELD_OUT_TASKS,
        description="most tasks that decide in the end, the first of the test split; null: all of it, as other methods "
        "take it; without a test split half of the tasks, then at most 100",
    )
    reflection_minibatch_size: int = Field(3, ge=1, le=20, description="rollouts that one reflection is shown")
    longest: int = Field(20_000, ge=100, le=100_000, description="most characters of a prompt")
