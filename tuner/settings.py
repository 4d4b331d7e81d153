"""The tuner's settings: section `tuner` of ratchet.yaml. Imports no torch."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet.trainer.settings.learner_settings import PlainUrl, Section

MIN_TRAIN_TASKS: Final = 3
MIN_VALIDATION_TASKS: Final = 3
MIN_HELD_OUT_TASKS: Final = 6  # with fewer pairs no difference is significant at 95%
SEARCH_ROLLOUTS: Final = 300  # of the search, if max_rollouts is null


class PromptSettings(Section):
    """How a system prompt is searched for."""

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


class TunerSettings(Section):
    """Settings of all tuning methods."""

    workflow: str | None = Field(
        None, description="agent to tune: module:function, or a command line such as 'python my_agent.py'"
    )
    tasks: str | None = Field(
        None, description="task set: an imported name, a folder, a file, or a name on the Hugging Face hub"
    )
    test_size: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a task set with one split that is held out as test; null: the set has a test split",
    )
    proxy_url: PlainUrl | None = Field(
        None, description="proxy that the rollouts use, without /v1; null: the running project's"
    )
    attempts: int = Field(1, ge=1, description="rollouts per task and candidate")
    concurrency: int = Field(8, ge=1, le=1024, description="rollouts that run at the same time")
    timeout_seconds: float = Field(600.0, gt=0, description="time limit of a rollout; a longer one has failed")
    max_retries: int = Field(0, ge=0, le=10, description="retries of a failed rollout; the last try counts")
    max_failures: int | float | None = Field(
        None,
        ge=0,
        description="stop after more failures than this number, or, below 1, than this share of the rollouts; null: "
        "stop if the first 16 rollouts all fail",
    )
    failure_score: float = Field(
        0.0, description="score of a failed rollout; never higher than the lowest judged score in the comparison"
    )
    judge_wait_seconds: float = Field(
        60.0, gt=0, description="maximum wait until the calls of a rollout are in the store and can be judged"
    )
    judge_away_seconds: float = Field(
        86_400.0,
        gt=0,
        description="time that trajectories wait for a judge function whose process is away, such as a closed "
        "notebook's; later ones are dropped as judge_failed",
    )
    prices: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="input_cost_per_token and output_cost_per_token by alias, for the models served by vLLM",
    )
    reflection: ModelSpec | None = Field(
        None,
        description="language model that reads rollouts and proposes prompts: one of model_list, or at base_url",
    )
    prompt: PromptSettings = Field(default_factory=PromptSettings, description="how a system prompt is searched for")
    lessons: dict[str, Any] = Field(default_factory=dict, description="settings of the plug-in lessons")
    seed: int = Field(0, ge=0, description="random seed of splits, samples and orders")
