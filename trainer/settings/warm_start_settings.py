"""Settings of a warm start (SFT). Unknown names are errors."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

RESERVED_SOURCES = POLICY, DEMONSTRATIONS = "policy", "demonstrations"  # all other source names are models


class WarmStartSettings(BaseModel):
    """The data and the hyperparameters of a warm start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

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

    @property
    def teachers(self) -> tuple[str, ...]:
        """Return the names of other models among the sources."""
        return tuple(name for name in self.sources if name not in RESERVED_SOURCES)
