"""The sections of the trainer's settings: adapters, release, resampling, sentinel and warm start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ratchet.trainer.settings.judge_specs import JudgeSpec
from ratchet.trainer.settings.learner_settings import PlainUrl, Section

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<place>[^/]*)")


class AdapterSettings(Section):
    """Where the adapters and the learner's states are kept."""

    store: str | None = Field(
        None,
        description="folder, `s3://bucket/prefix` or `gs://bucket/prefix` of the versions; null: the state folder "
        "([storage.md](storage.md))",
    )
    quorum: int | None = Field(
        None, ge=1, description="replicas that must serve a new version; null: all of one or two, else all but one"
    )
    max_cache_gb: float = Field(
        20.0, gt=0, description="size of the local copies of versions in object storage, GB; more than vLLM has loaded"
    )

    @field_validator("store")
    @classmethod
    def _place(cls, store: str | None) -> str | None:
        if not store:
            return None
        url = _URL.match(store)
        if url is None:
            return str(Path(store).expanduser().absolute())
        if url["protocol"] == "file":
            return str(Path(store.removeprefix("file://")).absolute())
        if "@" in url["place"]:
            raise ValueError("the URL holds credentials: give them by variable, such as AWS_ACCESS_KEY_ID")
        if not url["place"]:
            raise ValueError(f"{store} names no bucket; write it like s3://bucket/prefix")
        return store.rstrip("/")

    @property
    def max_cache_bytes(self) -> int:
        """The size of the local copies in bytes."""
        return int(self.max_cache_gb * 1e9)

    @property
    def is_remote(self) -> bool:
        """Whether the store is object storage."""
        return self.store is not None and "://" in self.store


class ReleaseSettings(Section):
    """How a proven version becomes live, and how it is taken back."""

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
    second_judge: JudgeSpec | None = Field(
        None,
        description="judge that must confirm the end of a ramp, else approval is required; null: the sentinel's",
    )

    @model_validator(mode="after")
    def _is_decidable(self) -> Self:
        if (self.workflow is None) != (self.tasks is None):
            raise ValueError("set workflow and tasks together: the workflow and its task set")
        return self


class ResamplingSettings(Section):
    """How further responses to single-call prompts are sampled."""

    samples: int = Field(
        0,
        ge=0,
        le=63,
        description="further responses to a single-call prompt that is in no group; 0: off",
    )
    calls_per_minute: int = Field(60, ge=1, description="maximum resample calls per minute")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="maximum tokens of resample calls per minute, prompts included; null: no limit"
    )
    concurrency: int = Field(2, ge=1, le=64, description="concurrent resample calls")
    max_running_requests: int = Field(
        0, ge=0, description="a resample call starts only while vLLM runs at most this many other calls and none waits"
    )
    max_wait_seconds: float = Field(
        300.0,
        gt=0,
        description="time to find an idle moment for a prompt; then its trajectory is handled as `ungrouped` says",
    )
    proxy_url: PlainUrl | None = Field(
        None, description="proxy for the resample calls, without /v1; null: one that serves the alias"
    )


class SentinelSettings(Section):
    """Thresholds; docs/sentinel.md explains them."""

    interval_seconds: float = Field(30.0, gt=0, description="time between checks")
    pause_training: bool = Field(True, description="pause training while a tool fails; false: only raise an alarm")
    max_tool_failure_rate: float = Field(
        0.95,
        gt=0,
        le=1,
        description="alarm if a tool's failure rate is above this, whatever its history",
    )
    min_coverage: float = Field(
        0.01,
        ge=0,
        le=1,
        description="alarm if a smaller share of the trajectories that are offered a tool use it; 0: off",
    )
    min_resource_coverage: float = Field(
        0.1,
        ge=0,
        le=1,
        description="alarm if tool calls name a smaller share of the files, URLs and ids in context; 0: off",
    )

    second_judge: JudgeSpec | None = Field(
        None, description="judge of a sample of the groups, compared with the first; its scores are not trained on"
    )
    block_release: bool = Field(
        True, description="require approval for releases while the second judge disagrees; false: only raise an alarm"
    )
    second_judge_sample_rate: float = Field(
        0.1, gt=0, le=1, description="share of the groups that the second judge scores"
    )


RESERVED_SOURCES = POLICY, DEMONSTRATIONS = "policy", "demonstrations"  # all other source names are models


class WarmStartSettings(Section):
    """The data and the hyperparameters of a warm start."""

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
