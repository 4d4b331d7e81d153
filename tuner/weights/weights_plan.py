"""The plan and the progress of a weight tuning, as stored, so that an interrupted run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from ratchet.store.operation_records import Tuning
from ratchet.trainer.errors import TuningError
from ratchet.trainer.settings.trainer_sections import WarmStartSettings
from ratchet.trainer.statistics import Compared
from ratchet.trainer.tasks import TEST

BASELINE, WARM_START, ROUNDS = "baseline", "warm_start", "rounds"  # stages in order
VALIDATION = "validation"  # the split that decides when to stop and which version is best
LIVE = "live"  # candidate name of rollouts that are trained


class WeightsPlan(BaseModel):
    """Parameters of a weight tuning."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    families: tuple[str, ...] = Field(min_length=1, description="task sets: SOURCE or NAME=SOURCE:WEIGHT")
    workflow: str = Field(description="the agent")
    family_workflows: Mapping[str, str] = Field(
        default_factory=dict, description="the agents of families that have their own, also in evaluations"
    )
    eval_workflow: str | None = Field(None, description="the agent of the evaluations, such as a greedy one")
    rounds: int = Field(20, ge=0, description="rounds of training tasks")
    tasks_per_round: int = Field(16, ge=1, description="training tasks per round")
    attempts: int = Field(8, ge=2, description="attempts at each task: the trainer's group size")
    eval_every: int = Field(5, ge=1, description="rounds between two evaluations on the validation tasks")
    eval_tasks: int | None = Field(None, ge=2, description="maximum number of test tasks of each family; null: all")
    validation_tasks: int = Field(32, ge=1, description="maximum number of validation tasks of each family")
    eval_attempts: int = Field(1, ge=1, description="attempts at each validation and test task")
    patience: int = Field(3, ge=0, description="stop after this many evaluations without a gain; 0: never")
    collect: int = Field(0, ge=0, description="rounds of rollouts for a warm start, not trained")
    warm_start: WarmStartSettings | None = Field(None, description="SFT before the rounds")
    max_trainer_wait_seconds: float = Field(60.0, gt=0, description="maximum wait for the trainer before an evaluation")
    seed: int = Field(0, ge=0, description="random seed of the task order")
    run_judge: Mapping[str, Any] | None = Field(
        None, description="judge of the training rollouts in place of the trainer's: functions of the calling process"
    )

    @property
    def workflows(self) -> str:
        """All workflows as one text."""
        return "; ".join([self.workflow, *(f"{name}={spec}" for name, spec in sorted(self.family_workflows.items()))])


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """A version on a split: its mean with an interval, and the difference to the baseline."""

    version: int
    split: str = TEST  # older runs evaluated on it alone
    round: int  # training rounds before the evaluation
    rollouts: int  # training rollouts before the evaluation
    tasks: int
    mean: float | None
    low: float
    high: float
    failed: int
    unjudged: int
    families: Mapping[str, float | None]  # mean by family
    against_baseline: Compared | None = None  # None for the baseline itself

    def describe(self) -> str:
        """Return a one-line description."""
        mean = "no score" if self.mean is None else f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"
        against = "" if self.against_baseline is None else f"; against the baseline {self.against_baseline.describe()}"
        return mean + against


class WeightsProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of a run."""

    stage: str = BASELINE
    baseline: int = 0  # live version at the start
    rounds: int = 0  # finished
    evaluations: tuple[Evaluated, ...] = ()
    warm_start: Mapping[str, Any] | None = None  # metrics of the warm start
    notes: tuple[str, ...] = ()
    wall_seconds: float = 0.0  # before the last interruption

    @property
    def best(self) -> Evaluated:
        """The validation with the highest mean; the earliest on ties."""
        return max(self.validated, key=lambda one: float("-inf") if one.mean is None else one.mean)

    @property
    def evaluations_without_gain(self) -> int:
        """Number of evaluations after the best one."""
        return len(self.validated) - 1 - self.validated.index(self.best)

    @property
    def validated(self) -> tuple[Evaluated, ...]:
        """Evaluations on validation tasks, oldest first."""
        return tuple(one for one in self.evaluations if one.split == VALIDATION) or self.evaluations


def config_of(plan: WeightsPlan) -> dict[str, Any]:
    """Return a plan for `store.tunings.begin`."""
    content = plan.model_dump(mode="json")
    return {name: value for name, value in content.items() if value is not None}


def plan_of(tuning: Tuning) -> WeightsPlan:
    """Return the plan of a run. Raises TuningError if the run is of another method."""
    if tuning.kind != "weights":
        raise TuningError(f"tuning {tuning.id} is a {tuning.kind} run, not a weights run")
    return WeightsPlan.model_validate(tuning.config)


def progress_of(tuning: Tuning) -> WeightsProgress:
    """Return the progress of a run; the initial one if nothing is stored."""
    return msgspec.convert(tuning.result or {}, WeightsProgress)


def plain(progress: WeightsProgress) -> dict[str, Any]:
    """Return progress for `store.tunings.update`."""
    content: dict[str, Any] = msgspec.to_builtins(progress)
    return content | {"stage": progress.stage}
