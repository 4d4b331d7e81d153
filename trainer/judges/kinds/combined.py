"""Judges made of judges: composite, by_family, and pairs judged in both orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.judges.judgement import (
    DraftVerdict,
    GroupJudgement,
    Judge,
    NamedJudge,
    compares,
    version_of,
)

# Judges pairs in both orders and averages the scores, for comparisons of two versions.
#
# Judge models slightly prefer what they read first or last. In training groups the order is shuffled by the members'
# ids, so the effect averages out; a decision between two versions must not depend on it. Judges that score each member
# alone and groups of more than two are judged once.


def judge_in_both_orders(judge: Judge, members: Sequence[Transcript]) -> GroupJudgement:
    """Return one verdict per member, in order; for a compared pair the mean over both orders.

    A verdict that failed in one order has failed: the score of one order alone would depend on the order.
    """
    first = judge.judge(None, members)
    if len(members) != 2 or not compares(judge):
        return first
    second = judge.judge(None, members[::-1])
    verdicts = map(_mean, first.verdicts, second.verdicts[::-1])
    return GroupJudgement(tuple(verdicts), (*first.judge_requests, *second.judge_requests))


def _mean(one: Verdict, other: Verdict) -> Verdict:
    costs = [verdict.cost for verdict in (one, other) if verdict.cost is not None]
    spent = {"cost": sum(costs) if costs else None, "latency": one.latency + other.latency}
    failed = next((verdict for verdict in (one, other) if verdict.score is None), None)
    if failed is not None:
        return msgspec.structs.replace(failed, **spent)
    return msgspec.structs.replace(one, score=((one.score or 0.0) + (other.score or 0.0)) / 2, **spent)


# The composite judge: the weighted mean of its parts' scores minus bounded penalties.
#
# If a part fails, the composite fails; a failure is never a zero. If a part is unavailable, so is the composite.
# `judge_specs.py` limits the penalties: together they are less than the smallest gap between a success and a failure,
# so that no success ranks below a failure. This requires that the parts score between 0 and 1.


@dataclass(frozen=True, slots=True)
class Part:
    """A judge with the `weight` of its score, or the `penalty` for a score of 0 (less in proportion above)."""

    name: str
    judge: Judge
    weight: float = 0.0
    penalty: float = 0.0


class CompositeJudge(NamedJudge):
    """The parts in order; each judges the whole group."""

    def __init__(self, parts: Sequence[Part], clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._parts = tuple(parts)
        self.concurrency = min(part.judge.concurrency for part in parts)
        self.compares = any(compares(part.judge) for part in parts)
        self.name = "composite:" + "+".join(part.name for part in parts)
        self.version = version_of(*((p.name, p.weight, p.penalty, p.judge.name, p.judge.version) for p in parts))

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
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
        for part in self._parts:
            part.judge.close()

    def _verdict(
        self, group_id: str | None, member: Transcript, verdicts: Sequence[Verdict], latency: float
    ) -> Verdict:
        costs = [verdict.cost for verdict in verdicts if verdict.cost is not None]
        cost = sum(costs) if len(costs) == len(verdicts) else None
        request = next((verdict.judge_request_id for verdict in verdicts if verdict.judge_request_id), None)
        opinion = combined(self._parts, verdicts)
        return self.record(opinion, group_id, member, cost=cost, latency=latency, judge_request_id=request)


def combined(parts: Sequence[Part], verdicts: Sequence[Verdict]) -> DraftVerdict:
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


# The by_family judge: each task family has a judge of its own, `other` scores the rest.
#
# The family is the part of the task's id before its last slash: `mail` of `mail/3f2a...`. A trajectory without a judge
# is a judge failure. Scores of different families are not comparable, and nothing compares them.


class ByFamilyJudge(NamedJudge):
    """The families' judges; each judges the members of a group that belong to it together."""

    def __init__(
        self, judges: Mapping[str, Judge], other: Judge | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(clock)
        self._judges = dict(judges)
        self._other = other
        self._all = [*judges.values(), *([] if other is None else [other])]
        self.concurrency = min(judge.concurrency for judge in self._all)
        self.compares = any(map(compares, self._all))
        self.name = "by_family:" + "+".join(self._judges)
        parts = [(name, one.name, one.version) for name, one in judges.items()]
        self.version = version_of(*parts, *([] if other is None else [("", other.name, other.version)]))

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        verdicts: dict[str, Verdict] = {}
        judgements: list[GroupJudgement] = []
        for family, group in _by_family(members).items():
            judge = self._judges.get(family, self._other)
            if judge is None:
                verdicts |= {one.trajectory.id: self._unjudged(group_id, one, family) for one in group}
                continue
            judgements.append(judge.judge(group_id, group))
            verdicts |= {one.trajectory_id: self._own(one) for one in judgements[-1].verdicts}
        return GroupJudgement(
            tuple(verdicts[member.trajectory.id] for member in members),
            tuple(request for one in judgements for request in one.judge_requests),
            tuple(score for one in judgements for score in one.teacher_scores),
            next((one.unavailable for one in judgements if one.unavailable is not None), None),
        )

    def close(self) -> None:
        for judge in self._all:
            judge.close()

    def _own(self, verdict: Verdict) -> Verdict:
        return msgspec.structs.replace(verdict, judge=self.name, judge_version=self.version)

    def _unjudged(self, group_id: str | None, member: Transcript, family: str) -> Verdict:
        where = f"the task family {family!r}" if member.trajectory.task else "trajectories without a task"
        reason = f"no judge of {where}: it has {', '.join(self._judges)}; add one, or set `other`"
        return self.record(DraftVerdict.failed(reason), group_id, member)


def _by_family(members: Sequence[Transcript]) -> dict[str, list[Transcript]]:
    found: dict[str, list[Transcript]] = {}
    for member in members:
        found.setdefault((member.trajectory.task or "").rpartition("/")[0], []).append(member)
    return found
