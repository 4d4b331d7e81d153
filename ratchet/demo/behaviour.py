"""What an agent did in its rollouts: its tool calls, whether it read a mail before it answered, or what it answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

COMMONEST = 3  # sequences that are kept


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Behaviour over some rollouts.

    `tools` are the calls of each tool per rollout, `mails_read` the mails opened per rollout. `answered` is the share
    of rollouts that gave an answer, `read_before_answer` the share of those that had opened a mail before. `sequences`
    are the commonest sequences of tools, or answers of an agent without tools, with their shares of the rollouts.
    """

    rollouts: int
    tools: Mapping[str, float]
    mails_read: float
    answered: float
    read_before_answer: float
    sequences: Mapping[str, float]


def behaviour_of(rows: Sequence[Mapping[str, Any]]) -> Behaviour:
    """Return the behaviour in the agent's result rows."""
    count = max(1, len(rows))
    answers = [row for row in rows if row["end"] == "answer"]
    calls = Counter(name for row in rows for name in row["tools"])
    sequences = Counter(_sequence(row) for row in rows)
    return Behaviour(
        rollouts=len(rows),
        tools={name: calls[name] / count for name in sorted(calls)},
        mails_read=sum(row["mails_read"] for row in rows) / count,
        answered=len(answers) / count,
        read_before_answer=fmean(row["mails_read"] > 0 for row in answers) if answers else 0.0,
        sequences={name: times / count for name, times in sequences.most_common(COMMONEST)},
    )


def _sequence(row: Mapping[str, Any]) -> str:
    if not row["tools"] and row["end"] == "answer":
        return str(row["answer"])
    steps = [*row["tools"], *([] if row["end"] == "answer" else [f"({row['end']})"])]
    return " > ".join(steps)
