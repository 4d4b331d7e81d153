"""Several judges as one: the weighted mean of the scores, less bounded penalties.

A failure of one part is a failure of the whole, never a zero. Penalties are bounded at the door (`settings.py`): all
of them together are less than the smallest gap between a success and a failure, so that no success ranks below a
failure. The scores of the parts must lie between 0 and 1, or that promise would not hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import Judge, Judgement
from ratchet.trainer.controller.judges.both_orders import compares
from ratchet.trainer.controller.judges.opinion import DraftVerdict, version_of


@dataclass(frozen=True, slots=True)
class Part:
    """A judge and its part: `weight` of its score, or `penalty` for what its score lacks to 1."""

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
        """As many groups as the most cautious part can take."""
        return min(part.judge.concurrency for part in self._parts)

    @property
    def compares(self) -> bool:
        """Whether any part sees the members together."""
        return any(compares(part.judge) for part in self._parts)

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> Judgement:
        """Return one verdict per member, in order."""
        began = time.perf_counter()
        told = [part.judge.judge(group_id, members) for part in self._parts]
        latency = (time.perf_counter() - began) / max(1, len(members))
        verdicts = [
            self._verdict(group_id, member, [judgement.verdicts[place] for judgement in told], latency)
            for place, member in enumerate(members)
        ]
        return Judgement(tuple(verdicts), tuple(one for judgement in told for one in judgement.judge_requests))

    def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            part.judge.close()

    def _verdict(self, group_id: str | None, member: Transcript, said: Sequence[Verdict], latency: float) -> Verdict:
        known = [verdict.cost for verdict in said if verdict.cost is not None]
        return combined(self._parts, said).verdict(
            member,
            group_id,
            judge=self.name,
            version=self.version,
            cost=sum(known) if len(known) == len(said) else None,
            latency=latency,
            judged_at=self._clock(),
            judge_request_id=next((verdict.judge_request_id for verdict in said if verdict.judge_request_id), None),
        )


def combined(parts: Sequence[Part], said: Sequence[Verdict]) -> DraftVerdict:
    """Return one opinion of the verdicts on one trajectory, one per part."""
    scores: list[float] = []
    for part, verdict in zip(parts, said, strict=True):
        if verdict.score is None:
            return DraftVerdict.failed(f"{part.name}: {verdict.failure}")
        if not 0.0 <= verdict.score <= 1.0:
            return DraftVerdict.failed(
                f"{part.name}: score {verdict.score:g} is not between 0 and 1, as a part's must be"
            )
        scores.append(verdict.score)
    whole = sum(part.weight for part in parts)
    mean = sum(part.weight * score for part, score in zip(parts, scores, strict=True)) / whole
    lost = sum(part.penalty * (1.0 - score) for part, score in zip(parts, scores, strict=True))
    words = [f"{part.name}: {verdict.explanation}" for part, verdict in zip(parts, said, strict=True)]
    components = {part.name: score for part, score in zip(parts, scores, strict=True)}
    return DraftVerdict.of(mean - lost, "; ".join(word for word in words if not word.endswith(": ")), components)
