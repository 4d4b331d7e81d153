"""Settings of the release, section `trainer.release`. Unknown names are errors."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet.trainer.settings.judge_specs import JudgeSpec


class ReleaseSettings(BaseModel):
    """How a proven version becomes live, and how it is taken back."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    policy: Literal["guarded", "immediate"] = Field(
        "guarded",
        description="guarded: a proven version serves beside the live one first, and is rolled back on evidence of "
        "harm; immediate: it becomes live at once, unprotected. Unless it is set, versions are released immediately "
        "while a run of `ratchet tune weights` trains the agent",
    )
    holdback: float = Field(
        0.1, gt=0, le=0.3, description="share of new trajectories that stay on the anchor; 0.3 while in doubt"
    )
    ramp: int | None = Field(
        None,
        ge=16,
        le=100_000,
        description="scored trajectories of a ramp, of all versions; null: 256, or half a round if that is more",
    )
    alpha: float = Field(
        0.001, gt=0, lt=0.05, description="highest probability that a version as good as those before it is rolled back"
    )
    deadline_seconds: float = Field(
        21600.0,
        gt=0,
        description="longest wait, after its start, for a trajectory's end and its score; unfinished, it counts as the "
        "worst. An open one is waited for ten times the usual duration, at least 15 minutes",
    )
    max_gain: float | None = Field(0.5, gt=0, description="a larger gain needs a person's approval; null: no limit")
    invariant_prompts: int = Field(
        64, ge=0, description="recent prompts that both versions answer before a candidate serves anybody; 0: none"
    )
    invariant_max_tokens: int = Field(1024, ge=16, description="longest answer to such a prompt, in tokens")
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
        description="judge that must confirm the end of a ramp, else approval is required; null: the sentinel's",
    )
    second_judge_pairs: int = Field(
        20, ge=4, description="pairs of a trajectory of the ramp and a live one that it judges"
    )

    @model_validator(mode="after")
    def _is_decidable(self) -> Self:
        if (self.workflow is None) != (self.tasks is None):
            raise ValueError("set workflow and tasks together: the workflow and its task set")
        return self
