"""Two versions' answers, compared by a judge that sees them together: asked in both orders, and the scores averaged.

A judge model likes what it reads first, or last, a little more. Within training groups that evens out, since members
are in an order seeded by their ids; a decision between two versions must not rest on it. Judges that score each member
alone are asked once, and so are groups of more than two, whose order is drawn for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import Judge, Judgement


@runtime_checkable
class ComparingJudge(Protocol):
    """A judge that says whether a member's score may depend on the others and their order."""

    @property
    def compares(self) -> bool:
        """Whether members are shown together."""


def compares(judge: Judge) -> bool:
    """Return whether a judge sees the members of a group together."""
    return isinstance(judge, ComparingJudge) and judge.compares


def judge_in_both_orders(judge: Judge, members: Sequence[Transcript]) -> Judgement:
    """Return one verdict per member, in order; of two members that are compared, the mean over both orders.

    A member whose verdict failed in one order has failed: half of it would carry the place that it was shown at.
    """
    first = judge.judge(None, members)
    if len(members) != 2 or not compares(judge):
        return first
    second = judge.judge(None, members[::-1])
    verdicts = map(_mean, first.verdicts, second.verdicts[::-1])
    return Judgement(tuple(verdicts), (*first.judge_requests, *second.judge_requests))


def _mean(one: Verdict, other: Verdict) -> Verdict:
    costs = [verdict.cost for verdict in (one, other) if verdict.cost is not None]
    spent = {"cost": sum(costs) if costs else None, "latency": one.latency + other.latency}
    failed = next((verdict for verdict in (one, other) if verdict.score is None), None)
    if failed is not None:
        return msgspec.structs.replace(failed, **spent)
    return msgspec.structs.replace(one, score=((one.score or 0.0) + (other.score or 0.0)) / 2, **spent)
