"""The tuner's settings, section `tuner` of ratchet.yaml: parsed once at the door, passed on as values. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet.trainer.settings.urls import PlainUrl
from ratchet.tuner.settings.lesson_settings import LessonSettings
from ratchet.tuner.settings.prompt_settings import PromptSettings


class TunerSettings(BaseModel):
    """What every method of the tuner needs to know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    workflow: str | None = Field(
        None, description="agent that is tuned: module:function, or a command line such as 'python my_agent.py'"
    )
    tasks: str | None = Field(
        None, description="task set: an imported name, a folder, a file, or a name of the Hugging Face hub"
    )
    test_size: float | None = Field(
        None, gt=0, lt=1, description="share of a task set with one split that is held out as test; null: it has both"
    )
    proxy_url: PlainUrl | None = Field(
        None, description="proxy that the rollouts go through, without /v1; null: the running project's"
    )
    attempts: int = Field(1, ge=1, description="rollouts of each task and candidate")
    concurrency: int = Field(8, ge=1, le=1024, description="rollouts at the same time")
    timeout_seconds: float = Field(600.0, gt=0, description="a rollout that takes longer has failed")
    retries: int = Field(0, ge=0, le=10, description="further tries of a rollout that failed; the last one counts")
    max_failures: int | float | None = Field(
        None,
        ge=0,
        description="stop early: more failures than this number, or than this share below 1; null: where the "
        "first 16 rollouts all failed",
    )
    failure_score: float = Field(
        0.0, description="score of a failed rollout; never more than the lowest judged score beside it"
    )
    judge_wait_seconds: float = Field(
        60.0, gt=0, description="longest wait for the calls of a rollout to be in the store before it is judged"
    )
    prices: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="input_cost_per_token and output_cost_per_token by alias, for the models that are served here",
    )
    reflection: ModelSpec | None = Field(
        None, description="language model that reads rollouts and proposes prompts; its base_url and model at least"
    )
    prompt: PromptSettings = Field(default_factory=PromptSettings, description="how a system prompt is searched for")
    lessons: LessonSettings = Field(
        default_factory=LessonSettings, description="how lessons are learnt from failed attempts, and tried"
    )
    seed: int = Field(0, ge=0, description="seed of whatever is drawn: splits, samples, orders")

    def too_many(self, failures: int, jobs: int) -> bool:
        """Whether so many failures, of so many jobs in all, are more than is allowed."""
        if self.max_failures is None:
            return False
        most = self.max_failures * jobs if 0 < self.max_failures < 1 else self.max_failures
        return failures > most
