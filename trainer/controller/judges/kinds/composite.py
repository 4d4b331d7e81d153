"""The composite judge: the weighted mean of its parts' scores minus bounded penalties.

If a part fails, the composite fails; a failure is never a zero. If a part is unavailable, so is the composite.
`judge_specs.py` limits the penalties: together they are less than the smallest gap between a success and a failure, so
that no success ranks below a failure. This requires that the parts score between 0 and 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement, Judge
from ratchet.trainer.controller.judges.both_orders import compares
from ratchet.trainer.controller.judges.opinion import DraftVerdict, version_of


@dataclass(frozen=True, slots=True)
class Part:
    """A judge with the `weight` of its score, or the `penalty` for a score of 0 (less in proportion above)."""

    name: str
    judge: Judge
    weight: float = 0.0
    penalty: float = 0.0


class CompositeJudge:
    """The parts in order; each judges the whole group."""

    def __init__(self, parts: Sequence[Part], clock: Callable[[], float] = time.time) -> None:
        self._parts = tuple(parts)
        self._clock = clock
        self.name = "composite:" + "+".join(part.name for part in parts)
        self.version = version_of(*((p.name, p.weight, p.penalty, p.judge.name, p.judge.version) for p in parts))

    @property
    def concurrency(self) -> int:
        """Return the smallest concurrency of the parts."""
        return min(part.judge.concurrency for part in self._parts)

    @property
    def compares(self) -> bool:
        """Return whether any part sees the members together."""
        return any(compares(part.judge) for part in self._parts)

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        began = time.perf_counter()
        judgements = [part.judge.judge(group_id, members) for part in self._parts]
        latency = (time.perf_counter() - began) / max(1, len(members))
        verdicts = [
            self._verdict(group_id, member, [judgement.verdicts[place] for judgement in judgements], latency)
            for place, member in enumerate(members)
        ]
        return GroupJudgement(
            tuple(verdicts),
            tuple(request for judgement in judgements for request in judgement.judge_requests),
            unavailable=next((one.unavailable for one in judgements if one.unavailable is not None), None),
        )

    def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            part.judge.close()

    def _verdict(
        self, group_id: str | None, member: Transcript, verdicts: Sequence[Verdict], latency: float
    ) -> Verdict:
        costs = [verdict.cost for verdict in verdicts if verdict.cost is not None]
        return combined(self._parts, verdicts).verdict(
            member,
            group_id,
            judge=self.name,
            version=self.version,
            cost=sum(costs) if len(costs) == len(verdicts) else None,
            latency=latency,
            judged_at=self._clock(),
            judge_request_id=next((verdict.judge_request_id for verdict in verdicts if verdict.judge_request_id), None),
        )


def combined(parts: Sequence[Part], verdicts: Sequence[Verdict]) -> DraftVerdict:
    """Return the draft verdict from the verdicts of the parts on one trajectory."""
    scores: list[float] = []
    for part, verdict in zip(parts, verdicts, strict=True):
        if verdict.score is None:
            return DraftVerdict.failed(f"{part.name}: {verdict.failure}")
        if not 0.0 <= verdict.score <= 1.0:
            return DraftVerdict.failed(
                f"{part.name}: score {verdict.score:g} is not between 0 and 1, as a part's must be"
            )
        scores.append(verdict.score)
    total_weight = sum(part.weight for part in parts)
    mean = sum(part.weight * score for part, score in zip(parts, scores, strict=True)) / total_weight
    penalty = sum(part.penalty * (1.0 - score) for part, score in zip(parts, scores, strict=True))
    explanations = [f"{part.name}: {verdict.explanation}" for part, verdict in zip(parts, verdicts, strict=True)]
    components = {part.name: score for part, score in zip(parts, scores, strict=True)}
    return DraftVerdict.of(
        mean - penalty,
        "; ".join(explanation for explanation in explanations if not explanation.endswith(": ")),
        components,
    )
