"""Judges pairs in both orders and averages the scores, for comparisons of two versions.

Judge models slightly prefer what they read first or last. In training groups the order is shuffled by the members' ids,
so the effect averages out; a decision between two versions must not depend on it. Judges that score each member alone
and groups of more than two are judged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement, Judge


@runtime_checkable
class ComparingJudge(Protocol):
    """A judge that declares whether scores depend on the other members and their order."""

    @property
    def compares(self) -> bool:
        """Return whether the judge sees the members together."""


def compares(judge: Judge) -> bool:
    """Return whether a judge sees the members of a group together."""
    return isinstance(judge, ComparingJudge) and judge.compares


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
