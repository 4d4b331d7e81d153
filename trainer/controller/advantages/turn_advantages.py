"""Rewards of single turns: what a judge says of the calls of a trajectory, beside what the whole is worth.

A component `turn:3` is the reward of a trajectory's third call. The rewards of all turns of a group are compared with
each other as scores are, and a call's tokens get that advantage, times a weight, on top of their trajectory's. Pure.
Groups in which only some members have such components, cohorts and singles get none: there is nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratchet.store.records import Verdict
from ratchet.trainer.controller.advantages.advantage import group_advantages

_PREFIX = "turn:"

Turns = Mapping[int, float]  # by the number of the call in its trajectory, from 1


def turn_advantages(verdicts: Sequence[Verdict], credit: str, weight: float) -> list[Turns]:
    """Return what each member's turns get on top of the trajectory's advantage; nothing where there is no weight."""
    said = [_turns(verdict) for verdict in verdicts]
    if not weight or len(said) < 2 or not all(said):
        return [{} for _ in said]
    found = iter(group_advantages([score for turns in said for score in turns.values()], credit))
    return [{number: weight * next(found) for number in turns} for turns in said]


def _turns(verdict: Verdict) -> Turns:
    named = {
        name.removeprefix(_PREFIX): score for name, score in verdict.components.items() if name.startswith(_PREFIX)
    }
    return {int(number): score for number, score in named.items() if number.isdecimal()}
