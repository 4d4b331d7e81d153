"""What the gate is told. Parsed once at the door; unknown names are errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet.trainer.settings.judge_specs import JudgeSpec


class ReleaseSettings(BaseModel):
    """How a proven version becomes live."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    canary: bool = Field(False, description="a proven version serves a share first; off: it is live at once")
    canary_share: float = Field(0.2, gt=0, lt=1, description="share of new trajectories that a canary serves")
    min_samples: int = Field(20, ge=2, description="scores of each side before anything is decided")
    max_samples: int = Field(200, ge=2, description="scores of the canary after which its mean decides")
    alpha: float = Field(0.05, gt=0, lt=0.5, description="chance of a false alarm, however often one looks")
    margin: float = Field(0.02, ge=0, description="mean score that a canary may be worse by and still be promoted")
    max_gain: float | None = Field(0.5, gt=0, description="a larger gain needs a person's approval; null: no limit")
    deadline_seconds: float = Field(86400.0, gt=0, description="a canary that is not promoted by then is rolled back")
    held_out_share: float = Field(0.0, ge=0, le=0.5, description="share of tasks that are set aside for evaluation")
    evaluation_prompts: int = Field(32, ge=5, description="held-out prompts or tasks that a candidate is tried with")
    evaluation_samples: int = Field(4, ge=1, description="answers of each version to each of them")
    workflow: str | None = Field(
        None, description="agent that plays held-out tasks under both versions, as tuner.workflow; null: none"
    )
    tasks: str | None = Field(
        None, description="task set that it plays: an imported one by name, a folder, a file, or a name of the hub"
    )
    split: str = Field("test", description="split of the task set that it plays")
    proxy_url: str | None = Field(
        None, description="proxy that its calls go through, without /v1; null: one that serves the alias"
    )
    evaluation_concurrency: int = Field(8, ge=1, le=1024, description="rollouts of the evaluation at the same time")
    evaluation_timeout_seconds: float = Field(600.0, gt=0, description="a rollout that takes longer has failed")
    second_judge: JudgeSpec | None = Field(
        None, description="asked before a promotion; one that disagrees holds it; null: the sentinel's"
    )
    second_judge_pairs: int = Field(20, ge=4, description="pairs of a canary's and a live trajectory that it is given")

    @model_validator(mode="after")
    def _can_decide(self) -> Self:
        if self.max_samples < self.min_samples:
            raise ValueError(
                f"max_samples {self.max_samples} is less than min_samples {self.min_samples}: the gate would never look"
            )
        if self.max_gain is not None and self.max_gain <= self.margin:
            raise ValueError(
                f"max_gain {self.max_gain:g} is not more than margin {self.margin:g}: no promotion would be left"
            )
        if (self.workflow is None) != (self.tasks is None):
            raise ValueError("workflow and tasks belong together: name the agent and the task set that it plays")
        return self

    def rules(self) -> ReleaseRules:
        """Return what the decision needs."""
        return ReleaseRules(self.alpha, self.margin, self.max_gain, self.min_samples, self.max_samples)


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """`margin` and `max_gain` are in units of the score; `least` and `most` count scores of the canary."""

    alpha: float = 0.05
    margin: float = 0.02
    max_gain: float | None = None
    min_samples: int = 20
    max_samples: int = 500
