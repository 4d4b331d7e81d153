"""Progress and results of a run: a bar with means, a line per round, rows of rollouts, and a summary.

Each metric has its own divisor: a rollout that ended in an API error has no turns to average, but counts as a failure.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ratchet.demo.email_search.agent import TaskRollout

_MEANS_INTERVAL = 0.5  # seconds between updates of the means in the bar


def mean_metrics(rows: Iterable[Mapping[str, float]], digits: int = 3) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: round(sum(values) / len(values), digits) for name, values in columns.items()}


def metrics(rollout: TaskRollout) -> dict[str, float]:
    """Return the metrics of one rollout; after an API error only those that still have a meaning."""
    row = {"success": float(rollout.success)}
    if rollout.end != "api_error":
        row |= {"turns": rollout.turns, "tool_failures": sum(rollout.tool_failures.values())}
        row["seconds"] = rollout.seconds
    if rollout.completion_tokens:
        row["completion_tokens"] = rollout.completion_tokens
    return row


class RolloutProgress:
    """A bar over all rollouts with running means on stderr, and lines at the end of each round and of all.

    Outside a terminal there are only the lines.
    """

    def __init__(self, name: str, total: int | None, per_round: int | None = None) -> None:
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len(name))),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[means]}", table_column=Column(no_wrap=True, ratio=1)),
        )
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars = Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal)
        self._name = name
        self._task = self._bars.add_task(name, total=total, means="")
        self._rows: list[dict[str, float]] = []
        self._per_round = per_round
        self._rounds: dict[int, list[dict[str, float]]] = {}
        self._means_at = time.monotonic()

    def add(self, rollout: TaskRollout) -> None:
        """Count one rollout; print its round when that is complete."""
        row = metrics(rollout)
        self._rows.append(row)
        now = time.monotonic()
        if now - self._means_at >= _MEANS_INTERVAL:
            self._means_at = now
            self._bars.update(self._task, means=_format(mean_metrics(self._rows)))
        self._bars.advance(self._task)
        if self._per_round is None:
            return
        number = rollout.index // self._per_round
        rows = self._rounds.setdefault(number, [])
        rows.append(row)
        if len(rows) == self._per_round:
            self._print(f"round={number + 1}", self._rounds.pop(number))

    def _print(self, head: str, rows: Sequence[Mapping[str, float]]) -> None:
        line = f"{head} rollouts={len(rows)} {_format(mean_metrics(rows))}"
        self._bars.console.print(line, markup=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
        if self._rows:
            self._print(self._name, self._rows)


class Results:
    """Writes each rollout to a JSON Lines file when it ends; nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def write(self, rollout: TaskRollout) -> None:
        """Write one row."""
        if self._file is not None:
            self._file.write(json.dumps(asdict(rollout), ensure_ascii=False) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def summary(rollouts: Sequence[TaskRollout]) -> dict[str, Any]:
    """Return counts and means of a run: `success` is over all rollouts, including API errors."""
    failures: Counter[str] = Counter()
    for rollout in rollouts:
        failures.update(rollout.tool_failures)
    return {
        "rollouts": len(rollouts),
        "tasks": len({rollout.task_id for rollout in rollouts}),
        **mean_metrics(map(metrics, rollouts), 4),
        "prompt_tokens_total": sum(rollout.prompt_tokens for rollout in rollouts),
        "completion_tokens_total": sum(rollout.completion_tokens for rollout in rollouts),
        "ends": dict(Counter(rollout.end for rollout in rollouts)),
        "tool_failures_by_class": dict(failures),
        "failed_rollouts": sum(rollout.end == "api_error" for rollout in rollouts),
        "models": sorted({model for rollout in rollouts for model in rollout.models}),
    }


def _format(means: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value}" for name, value in means.items())
