"""What a run shows and keeps: a progress bar with running means, rows of results, and a summary.

Each metric has its own divisor: a rollout that ended in an API error has no turns to average, but counts against
success. Nothing here talks to a server.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tqdm import tqdm

from ratchet.demo.email_search.agent import Rollout


class MetricMeans:
    """Means of named metrics over what was added so far; each metric counts only the rows that have it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._divisors: Counter[str] = Counter()

    def add(self, row: dict[str, float]) -> None:
        """Adds one row of metrics."""
        for name, value in row.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._divisors[name] += 1

    def means(self) -> dict[str, float]:
        """The mean of each metric seen so far."""
        return {name: total / self._divisors[name] for name, total in self._sums.items()}


def metrics(rollout: Rollout) -> dict[str, float]:
    """The metrics of one rollout; those that an API error leaves without meaning are missing."""
    row = {"success": float(rollout.success)}
    if rollout.end != "api_error":
        row |= {"turns": rollout.turns, "tool_failures": sum(rollout.tool_failures.values())}
        row["seconds"] = rollout.seconds
    if rollout.completion_tokens:
        row["completion_tokens"] = rollout.completion_tokens
    return row


class RolloutProgress:
    """One bar over all rollouts (done/total, time a rollout, time left, running means), one line for each round."""

    def __init__(self, name: str, total: int, per_round: int | None = None) -> None:
        self._bar: tqdm[Any] = tqdm(total=total, desc=name, unit="rollout", file=sys.stderr, mininterval=0.5)
        self._means, self._per_round = MetricMeans(), per_round
        self._rounds: dict[int, MetricMeans] = {}
        self._done: Counter[int] = Counter()

    def add(self, rollout: Rollout) -> None:
        """Counts one rollout; tells of its round when that is complete."""
        self._means.add(metrics(rollout))
        self._bar.set_postfix(_rounded(self._means.means()), refresh=False)
        self._bar.update()
        if self._per_round is None:
            return
        number = rollout.index // self._per_round
        self._rounds.setdefault(number, MetricMeans()).add(metrics(rollout))
        self._done[number] += 1
        if self._done[number] == self._per_round:
            told = " ".join(f"{name}={value}" for name, value in _rounded(self._rounds.pop(number).means()).items())
            self._bar.write(f"round={number + 1} rollouts={self._per_round} {told}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class Results:
    """Rows of results: one JSON object a line, on disk as each rollout ends. Without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def write(self, rollout: Rollout) -> None:
        """Writes one row."""
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


def summary(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Counts and means of a run: `success` is over all rollouts, API errors included."""
    means = MetricMeans()
    failures: Counter[str] = Counter()
    for rollout in rollouts:
        means.add(metrics(rollout))
        failures.update(rollout.tool_failures)
    return {
        "rollouts": len(rollouts),
        "tasks": len({rollout.task_id for rollout in rollouts}),
        **_rounded(means.means(), 4),
        "prompt_tokens_total": sum(rollout.prompt_tokens for rollout in rollouts),
        "completion_tokens_total": sum(rollout.completion_tokens for rollout in rollouts),
        "ends": dict(Counter(rollout.end for rollout in rollouts)),
        "tool_failures_by_class": dict(failures),
        "failed_rollouts": sum(rollout.end == "api_error" for rollout in rollouts),
        "models": sorted({model for rollout in rollouts for model in rollout.models}),
    }


def _rounded(means: dict[str, float], digits: int = 3) -> dict[str, float]:
    return {name: round(value, digits) for name, value in means.items()}
