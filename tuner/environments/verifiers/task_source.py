"""`verifiers:NAME` and `verifiers:FILE.toml` as task sets: the plug-in `verifiers` of `ratchet.task_sources`.

A row holds what the task itself holds (prompt, answer, ...), and in the column `verifiers` the environment's
description and the task's key, from which the workflow finds the task again. Equal tasks have equal rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratchet.trainer.tasks.file_reader import Numbered
from ratchet.trainer.tasks.task_set import TRAIN, TaskSet, content_id
from ratchet.tuner.environments.verifiers.environment import ROW, Spec, content_of, tasks_of


def open_taskset(source: str) -> TaskSet:
    """Open a taskset by its name or by a configuration file of verifiers. Raises TaskSetError."""
    spec = Spec.of_source(source)
    spec.load()  # an unknown name is reported now
    name = Path(source).stem if source.endswith(".toml") else source.rsplit("/", 1)[-1].partition("@")[0]

    def rows() -> Iterator[Numbered]:
        return ((number, _row(spec, task)) for number, task in enumerate(tasks_of(spec), 1))

    return TaskSet.of_rows(re.sub(r"[^\w.-]", "_", name), f"verifiers:{source}", {TRAIN: rows})


def _row(spec: Spec, task: Any) -> dict[str, Any]:
    content = content_of(task)
    return content | {ROW: spec.row() | {"key": content_id(content)}}
