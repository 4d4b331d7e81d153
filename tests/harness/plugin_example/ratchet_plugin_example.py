"""A judge, a loss, an advantage estimator, a prompt optimizer and a monitor, registered in pyproject.toml."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.judges.judgement import GroupJudgement
from ratchet.trainer.observability.monitors import Point
from ratchet.trainer.settings.objectives import AdvantageFunctions, Objective, StepTokens
from ratchet.tuner.prompts.optimizer import Evaluate, Reflection, Search


class BrevityJudge:
    """`judge: {kind: brevity, max_chars: 200}`: 1.0 for an empty last answer, 0.0 from `max_chars` characters on."""

    name = "brevity"
    concurrency = 1

    def __init__(self, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        if unknown := sorted(set(settings) - {"max_chars"}):
            raise ValueError(f"unknown settings {unknown}: the only one is max_chars")
        self._max_chars = int(settings.get("max_chars", 200))
        self.version = f"1/{self._max_chars}"

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        return GroupJudgement(tuple(self._verdict(group_id, member) for member in members))

    def close(self) -> None:
        """Release nothing: this judge holds no connection."""

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        length = len(str(member.messages[-1].get("content") or ""))
        score = max(0.0, 1.0 - length / self._max_chars)
        return Verdict(
            trajectory_id=member.trajectory.id,
            group_id=group_id,
            judge=self.name,
            judge_version=self.version,
            score=score,
        )


class BestOf:
    """`--method best_of`: proposes prompts from failed training tasks and scores each on the validation tasks."""

    PROPOSALS = 3

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search; see ratchet.tuner.prompts.optimizer.PromptOptimizer."""
        best, best_score = seed_prompt, sum(evaluate.scores(seed_prompt, search.validation))
        for _ in range(self.PROPOSALS):
            evaluate.scores(best, search.train)
            proposed = reflection.propose(best, [evaluate.example(best, task) for task in search.train])
            score = sum(evaluate.scores(proposed, search.validation))
            if score > best_score:
                best, best_score = proposed, score


class JsonLinesMonitor:
    """`report_to: [json_lines]`: appends each point to `points.jsonl` in the monitor's folder."""

    def __init__(self, folder: Path, alias: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._alias = alias
        self._file = (folder / "points.jsonl").open("a")

    def write(self, points: Sequence[Point]) -> None:
        """Write points, oldest first."""
        for point in points:
            line = {"model": f"{self._alias}@{point.version}", "at": point.at, **point.values}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def clamp_at_zero(tokens: StepTokens) -> Any:
    """Return advantages (N, T) without the negative ones: nothing is made less likely."""
    return tokens.advantages.clamp(min=0)


# `loss_type: positive_only`: the terms of dapo for what was better than its group.
POSITIVE_ONLY = Objective("clip", "token", "tokens", 0.2, 0.28, token_advantages=clamp_at_zero)


def over_median(scores: Sequence[float]) -> list[float]:
    """Return each score minus the median, which one extreme score does not move."""
    return [score - statistics.median(scores) for score in scores]


# `advantage_estimator: median`
MEDIAN = AdvantageFunctions(over_median)
