"""The result of a tuning run in `tunings.result`: one form for all methods, so that one report compares them.

`plain` writes it and `read` reads it. `gain` is measured on held-out tasks only, against the version served before.
Fields of a single method go into `details`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from ratchet.trainer.statistics import Compared
from ratchet.tuner.rollouts.prices import RolloutCost

Method = Literal["select-model", "prompt", "weights", "eval", "lessons"]


class TaskSetUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of the gain; only runs with the same `fingerprint` are compared."""

    source: str  # as given by the user
    split: str
    tasks: int
    fingerprint: str  # of the task ids, independent of their order


class TuningResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one run of one method."""

    method: Method
    technique: str  # such as "paired comparison of 3 models", "GEPA", "GRPO, 12 rounds"
    alias: str
    task_set: TaskSetUsed
    judge: str  # name and version
    workflow: str
    attempts: int = 1  # at each task
    baseline: str | None = None  # a model, `alias@0` or a prompt id
    best: str | None = None  # None: nothing is shown to be better
    gain: Compared | None = None  # best against baseline on held-out tasks; None: not measured
    spent: RolloutCost = RolloutCost()  # search, training and evaluation
    wall_seconds: float = 0.0  # elapsed time
    promoted: str | None = None  # version released by this run, such as `policy@4`
    notes: tuple[str, ...] = ()  # shown below the report
    details: Mapping[str, Any] = {}


def fingerprint(task_ids: Iterable[str]) -> str:
    """Return a hash of task ids, 16 hex digits, independent of their order and of family prefixes."""
    names = {task_id.rpartition("/")[2] for task_id in task_ids}
    return blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()


def task_set(source: str, split: str, task_ids: Sequence[str]) -> TaskSetUsed:
    """Return the description of the tasks for the report."""
    return TaskSetUsed(source=source, split=split, tasks=len(set(task_ids)), fingerprint=fingerprint(task_ids))


def plain(result: TuningResult) -> dict[str, Any]:
    """Return a result as JSON values, for `store.tunings.end`."""
    content: dict[str, Any] = msgspec.to_builtins(result)
    return content


def read(content: Mapping[str, Any]) -> TuningResult:
    """Return the result of a run. Raises msgspec.ValidationError."""
    return msgspec.convert(content, TuningResult)
