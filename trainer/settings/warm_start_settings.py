"""What a warm start is told. Parsed once at the door; unknown names are errors."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

POLICY, DEMONSTRATIONS = "policy", "demonstrations"


class WarmStartSettings(BaseModel):
    """What is imitated, beside what, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    sources: tuple[str, ...] = Field(
        (POLICY, DEMONSTRATIONS),
        min_length=1,
        description="policy: the policy's good trajectories; demonstrations: demonstrations of feedback; else the name "
        "of another model whose trajectories were recorded",
    )
    min_score: float = Field(0.5, description="score from which on a trajectory is good enough to be imitated")
    min_trajectories: int = Field(16, ge=1, description="fewer trajectories than this are refused")
    max_per_source: int = Field(2000, ge=1, description="the newest so many of each source are looked at")
    max_per_task: int = Field(4, ge=1, description="the best so many trajectories of a task are taken")
    general: str | None = Field(
        None, description="general chat data mixed in: a task set whose rows hold `messages` (and `tools`)"
    )
    general_split: str = Field("train", description="split of it that is read")
    general_ratio: float = Field(0.2, ge=0, lt=1, description="share of general conversations among all")
    general_held_out: int = Field(64, ge=1, description="general conversations that are only measured")
    max_loss_increase: float | None = Field(
        None, gt=0, description="nats per token that the held-out general loss may rise by; null: only shown"
    )
    num_train_epochs: int = Field(2, ge=1, description="times that each row is learnt from")
    batch_size: int = Field(32, ge=1, description="rows of an optimiser step")
    learning_rate: float | None = Field(None, gt=0, description="of AdamW; null: the learner's own")
    seed: int = Field(0, description="of the mixture")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"sources names one twice: {', '.join(self.sources)}")
        if self.max_loss_increase is not None and self.general is None:
            raise ValueError("max_loss_increase is measured on general data: set `general` as well")
        return self

    @property
    def teachers(self) -> tuple[str, ...]:
        """Return the names of other models whose trajectories are imitated."""
        return tuple(name for name in self.sources if name not in (POLICY, DEMONSTRATIONS))
