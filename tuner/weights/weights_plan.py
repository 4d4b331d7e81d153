"""What a tuning of weights is told, and how far it is: both as the store keeps them, so that a killed one goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from ratchet.store.records.tuning import Tuning
from ratchet.trainer.errors import TuningError
from ratchet.trainer.settings.warm_start_settings import WarmStartSettings
from ratchet.trainer.statistics.paired_comparison import Compared
from ratchet.trainer.tasks.task_set import TEST

BASELINE, WARM_START, ROUNDS = "baseline", "warm_start", "rounds"  # the stages, in order
VALIDATION = "validation"  # the split that decides when to stop and what is best
LIVE = "live"  # the candidate's name of the rollouts that train


class WeightsPlan(BaseModel):
    """How the weights are tuned."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    families: tuple[str, ...] = Field(min_length=1, description="task sets: SOURCE or NAME=SOURCE:WEIGHT")
    workflow: str = Field(description="the agent")
    eval_workflow: str | None = Field(None, description="the agent while it is evaluated, such as a greedy one")
    rounds: int = Field(20, ge=0, description="rounds of training tasks")
    tasks_per_round: int = Field(16, ge=1, description="training tasks of a round")
    attempts: int = Field(8, ge=2, description="attempts at each of them: the trainer's group size")
    eval_every: int = Field(5, ge=1, description="rounds between two evaluations on the validation tasks")
    eval_tasks: int | None = Field(None, ge=2, description="test tasks of each family; null: all")
    validation_tasks: int = Field(32, ge=1, description="validation tasks of each family, at most")
    eval_attempts: int = Field(1, ge=1, description="attempts at each of them")
    patience: int = Field(3, ge=0, description="evaluations without a gain after which it stops; 0: never")
    collect: int = Field(0, ge=0, description="rounds of training tasks that are only tried, for a warm start")
    warm_start: WarmStartSettings | None = Field(None, description="what is imitated first")
    max_trainer_wait_seconds: float = Field(60.0, gt=0, description="longest wait for the trainer before an evaluation")
    seed: int = Field(0, ge=0, description="of the tasks that are drawn")


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """One version on one split's tasks: its mean with an interval, and the difference to the baseline."""

    version: int
    split: str = TEST  # runs of earlier releases evaluated on it alone
    round: int  # rounds of training tasks before it
    rollouts: int  # that trained, before it
    tasks: int
    mean: float | None
    low: float
    high: float
    failed: int
    unjudged: int
    families: Mapping[str, float | None]  # mean by family
    against_baseline: Compared | None = None  # None of the baseline itself

    def describe(self) -> str:
        """Return it in one clause."""
        mean = "no score" if self.mean is None else f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"
        against = "" if self.against_baseline is None else f"; against the baseline {self.against_baseline.describe()}"
        return mean + against


class WeightsProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a tuning is."""

    stage: str = BASELINE
    baseline: int = 0  # the version that was live when it began
    rounds: int = 0  # done
    evaluations: tuple[Evaluated, ...] = ()
    warm_start: Mapping[str, Any] | None = None  # what came of it
    notes: tuple[str, ...] = ()
    wall_seconds: float = 0.0  # of earlier runs, before it was interrupted

    @property
    def best(self) -> Evaluated:
        """The evaluation on validation tasks with the highest mean; the earliest of equal ones."""
        return max(self.validated, key=lambda one: float("-inf") if one.mean is None else one.mean)

    @property
    def evaluations_without_gain(self) -> int:
        """How many evaluations came after the best one."""
        return len(self.validated) - 1 - self.validated.index(self.best)

    @property
    def validated(self) -> tuple[Evaluated, ...]:
        """The evaluations that decide, oldest first; the test tasks decide nothing."""
        return tuple(one for one in self.evaluations if one.split == VALIDATION) or self.evaluations


def config_of(plan: WeightsPlan) -> dict[str, Any]:
    """Return a plan as `store.tunings.begin` takes it."""
    content = plan.model_dump(mode="json")
    return {name: value for name, value in content.items() if value is not None}


def plan_of(tuning: Tuning) -> WeightsPlan:
    """Return the plan that a tuning began with. Raises TuningError where it is of another method."""
    if tuning.kind != "weights":
        raise TuningError(f"tuning {tuning.id} is one of {tuning.kind}, not of weights")
    return WeightsPlan.model_validate(tuning.config)


def progress_of(tuning: Tuning) -> WeightsProgress:
    """Return how far a tuning is; at its beginning where nothing is written down."""
    return msgspec.convert(tuning.result or {}, WeightsProgress)


def plain(progress: WeightsProgress) -> dict[str, Any]:
    """Return progress as `store.tunings.update` takes it."""
    content: dict[str, Any] = msgspec.to_builtins(progress)
    return content | {"stage": progress.stage}
