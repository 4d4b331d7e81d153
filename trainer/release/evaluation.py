"""The result of a paired evaluation: a candidate's answers and the live version's, judged as one group per prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.store.records import Transcript
from ratchet.store.statistics import interval
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.both_orders import judge_in_both_orders

MIN_PROMPTS = 5
PROMPT_SET = "prompt_set"  # key of a decision's evidence

Sides = tuple[Sequence[Transcript], Sequence[Transcript]]  # the candidate's and the live version's answers to a prompt


@dataclass(frozen=True, slots=True)
class PairedEvaluation:
    """The mean over prompts of (candidate - live) in units of the score, with its 95% interval."""

    prompts: int
    unjudged: int  # prompts (of a workflow: attempts) that the judge failed on
    candidate: float
    live: float
    difference: float
    low: float
    high: float
    what: str = "prompts"

    @property
    def worse(self) -> bool:
        """Whether the candidate is shown to be worse."""
        return self.high < 0

    def describe(self) -> str:
        """Return the figures as one clause."""
        return (
            f"on {self.prompts} held-out {self.what} {self.candidate:.3f} against {self.live:.3f}: "
            f"difference {self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result by the judge, and by the second judge on the same answers.

    first       None if there was too little to compare
    run         the tuner's run, if a workflow played the tasks
    prompt_set  a hash of the prompts, equal if they were the same ones
    changed     whether the prompts differ from those of the previous evaluation
    """

    first: PairedEvaluation | None
    second: PairedEvaluation | None = None
    second_judge: str = ""
    run: str | None = None
    prompt_set: str = ""
    changed: bool = False

    def evidence(self) -> dict[str, Any]:
        """Return it in the form of a decision's evidence."""
        evidence: dict[str, Any] = {"evaluation": asdict(self.first)} if self.first else {}
        if self.second:
            evidence["second_evaluation"] = {"judge": self.second_judge} | asdict(self.second)
        if self.first and self.prompt_set:
            evidence |= {PROMPT_SET: self.prompt_set, "prompt_set_changed": self.changed}
        return evidence | ({"run": self.run} if self.run else {})

    def describe(self) -> str:
        """Return the judge's result as one clause; "" if there was too little to compare."""
        changed = " (other prompts than in the previous evaluation)" if self.changed else ""
        return f"{self.first.describe()}{changed}" if self.first else ""

    def blocking_reason(self, max_gain: float | None) -> str | None:
        """Return why the candidate needs approval before it serves; None if it does not."""
        if self.first is None:
            return None
        reasons = []
        if max_gain is not None and self.first.difference > max_gain:
            reasons.append(f"the gain exceeds max_gain {max_gain:g}: {self.first.describe()}")
        if self.second_judge and (reason := self._second_judge_reason(self.first)):
            reasons.append(reason)
        return "; ".join(reasons) or None

    def _second_judge_reason(self, first: PairedEvaluation) -> str | None:
        if self.second is None:
            return f"second judge {self.second_judge} failed on too many of the answers"
        described = f"second judge {self.second_judge} {self.second.describe()}"
        if self.second.worse:
            return f"{described}: it finds the candidate worse"
        if first.low > 0 and self.second.difference <= 0:
            return f"{described}: it does not see the gain of {first.difference:+.3f}"
        return None


def summarize_pairs(
    scored: Sequence[tuple[float, float]], unjudged: int, what: str = "prompts"
) -> PairedEvaluation | None:
    """Return the evaluation of (candidate, live) mean scores by prompt; None for fewer than `MIN_PROMPTS`."""
    if len(scored) < MIN_PROMPTS:
        return None
    gains = [candidate - live for candidate, live in scored]
    scores = [score for pair in scored for score in pair]
    low, high = interval(gains, max(scores) - min(scores) or 1.0)
    candidate, live = (statistics.fmean(side) for side in zip(*scored, strict=True))
    return PairedEvaluation(len(scored), unjudged, candidate, live, statistics.fmean(gains), low, high, what)


def compare_with_judge(judge: Judge, answers: Sequence[Sides], what: str = "prompts") -> PairedEvaluation | None:
    """Judge both sides of each prompt as one group; return None for fewer than `MIN_PROMPTS` judged prompts."""
    with ThreadPoolExecutor(judge.concurrency, thread_name_prefix="evaluation_judge") as threads:
        scored = [pair for pair in threads.map(lambda sides: _mean_scores(judge, sides), answers) if pair is not None]
    return summarize_pairs(scored, len(answers) - len(scored), what)


def _mean_scores(judge: Judge, sides: Sides) -> tuple[float, float] | None:
    members = [*sides[0], *sides[1]]
    scores = [verdict.score for verdict in judge_in_both_orders(judge, members).verdicts if verdict.score is not None]
    if len(scores) < len(members):
        return None
    return statistics.fmean(scores[: len(sides[0])]), statistics.fmean(scores[len(sides[0]) :])
