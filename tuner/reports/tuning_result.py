"""What a tuning run leaves in `tunings.result`: one shape for all methods, so that one report tells them side by side.

A run writes `plain(result)`; `read` gives it back. `gain` is measured on held-out tasks alone, against what served
before. What only one method knows goes into `details`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from ratchet.trainer.statistics.paired_comparison import Compared
from ratchet.tuner.rollouts.prices import RolloutCost

Method = Literal["select-model", "prompt", "weights", "eval", "lessons"]


class TaskSetUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that the gain was measured on; runs are compared only where `fingerprint` is the same."""

    source: str  # as the user named it
    split: str
    tasks: int
    fingerprint: str  # of the ids of these tasks, whatever their order


class TuningResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one run of one method."""

    method: Method
    technique: str  # in a few words: "paired comparison of 3 models", "GEPA", "GRPO, 12 rounds"
    alias: str
    task_set: TaskSetUsed
    judge: str  # name and version: scores of two judges are not compared
    workflow: str
    attempts: int = 1  # at each task
    baseline: str | None = None  # what the gain is against: a model, `alias@0`, a prompt's id
    best: str | None = None  # what was found; None where nothing is shown to be better
    gain: Compared | None = None  # best against baseline on the held-out tasks; None where it was not measured
    spent: RolloutCost = RolloutCost()  # in all: search, training and evaluation
    wall_seconds: float = 0.0  # from begin to end, for whoever waited
    promoted: str | None = None  # what serves now because of this run, such as `policy@4`; None: nothing
    notes: tuple[str, ...] = ()  # what a reader must know, such as who stood in for a model
    details: Mapping[str, Any] = {}


def fingerprint(task_ids: Iterable[str]) -> str:
    """Return the name of a set of tasks, 16 hex digits, whatever their order and the family that they are told of."""
    names = {task_id.rpartition("/")[2] for task_id in task_ids}
    return blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()


def task_set(source: str, split: str, task_ids: Sequence[str]) -> TaskSetUsed:
    """Return what the report must know of the tasks."""
    return TaskSetUsed(source=source, split=split, tasks=len(set(task_ids)), fingerprint=fingerprint(task_ids))


def plain(result: TuningResult) -> dict[str, Any]:
    """Return a result as JSON can hold it, for `store.tunings.end`."""
    content: dict[str, Any] = msgspec.to_builtins(result)
    return content


def read(content: Mapping[str, Any]) -> TuningResult:
    """Return the result that a run left. Raises msgspec.ValidationError where it is none."""
    return msgspec.convert(content, TuningResult)
