"""Settings of the release, section `trainer.release`. Unknown names are errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet.trainer.settings.judge_specs import JudgeSpec


class ReleaseSettings(BaseModel):
    """How a proven version becomes live."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    canary: bool = Field(
        False, description="a proven version serves a share of new trajectories first; false: it becomes live at once"
    )
    canary_share: float = Field(0.2, gt=0, lt=1, description="share of new trajectories that a canary serves")
    min_samples: int = Field(20, ge=2, description="scores of each version before a decision")
    max_samples: int = Field(200, ge=2, description="scores of the canary after which its mean decides")
    alpha: float = Field(0.05, gt=0, lt=0.5, description="error probability of a decision, however often it is checked")
    margin: float = Field(0.02, ge=0, description="a canary is promoted if its mean score is at most this much lower")
    max_gain: float | None = Field(0.5, gt=0, description="a larger gain needs a person's approval; null: no limit")
    deadline_seconds: float = Field(
        86400.0, gt=0, description="a canary that is not promoted after this time is rolled back"
    )
    held_out_share: float = Field(0.0, ge=0, le=0.5, description="share of tasks that are held out for evaluation")
    evaluation_prompts: int = Field(32, ge=5, description="held-out prompts or tasks that a candidate is evaluated on")
    evaluation_samples: int = Field(4, ge=1, description="responses of each version per prompt, or attempts per task")
    workflow: str | None = Field(
        None, description="workflow that runs held-out tasks with both versions, as tuner.workflow; null: none"
    )
    tasks: str | None = Field(
        None, description="task set of the workflow: an imported name, a folder, a file or a hub name"
    )
    split: str = Field("test", description="split of that task set")
    proxy_url: str | None = Field(
        None, description="proxy for the workflow's calls, without /v1; null: one that serves the alias"
    )
    evaluation_concurrency: int = Field(8, ge=1, le=1024, description="concurrent rollouts of the evaluation")
    evaluation_timeout_seconds: float = Field(600.0, gt=0, description="timeout of a rollout, which counts as failed")
    second_judge: JudgeSpec | None = Field(
        None,
        description="judge that must confirm a promotion, else approval is required; null: the sentinel's",
    )
    second_judge_pairs: int = Field(20, ge=4, description="pairs of a canary and a live trajectory that it judges")

    @model_validator(mode="after")
    def _is_decidable(self) -> Self:
        if self.max_samples < self.min_samples:
            raise ValueError(
                f"max_samples {self.max_samples} is less than min_samples {self.min_samples}: nothing would be decided"
            )
        if self.max_gain is not None and self.max_gain <= self.margin:
            raise ValueError(
                f"max_gain {self.max_gain:g} is not more than margin {self.margin:g}: each promotion would need "
                "approval"
            )
        if (self.workflow is None) != (self.tasks is None):
            raise ValueError("set workflow and tasks together: the workflow and its task set")
        return self

    def rules(self) -> ReleaseRules:
        """Return the parameters of the decision."""
        return ReleaseRules(self.alpha, self.margin, self.max_gain, self.min_samples, self.max_samples)


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """`margin` and `max_gain` are in units of the score; `min_samples` and `max_samples` count scores of the canary."""

    alpha: float = 0.05
    margin: float = 0.02
    max_gain: float | None = None
    min_samples: int = 20
    max_samples: int = 500
