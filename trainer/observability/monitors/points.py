"""Points from the store: committed rounds and the decisions about versions, oldest first. Reads only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.store.policies.serving import Decision
from ratchet.store.records import Round
from ratchet.store.states import RoundState
from ratchet.store.store import Store
from ratchet.trainer.observability.monitors import Point

_MOST = 1000  # rounds or decisions of one look
_SETTINGS = "settings"
_MOST_VALUES = 200  # of one point: what others named can be many


@dataclass(frozen=True, slots=True)
class Cursor:
    """What has been read: the last round that ended, and the last decision."""

    round_id: str = ""
    decision_id: int = 0


def newer(store: Store, alias: str, cursor: Cursor) -> tuple[list[Point], Cursor]:
    """Return the points after the cursor, oldest first, at most some thousands, and the cursor after them."""
    ended = _ended(store.rounds.rounds_after(alias, cursor.round_id, _MOST))
    decided = store.decisions.decisions_after(alias, cursor.decision_id, _MOST)
    points = [_round(one) for one in ended if one.state is RoundState.COMMITTED] + [_decision(one) for one in decided]
    return sorted(points, key=lambda point: point.at), Cursor(
        round_id=ended[-1].id if ended else cursor.round_id,
        decision_id=decided[-1].id if decided else cursor.decision_id,
    )


def _ended(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds before the first that is under way: that one is read when it has ended."""
    open_at = next((place for place, one in enumerate(rounds) if one.state is RoundState.STARTED), len(rounds))
    return list(rounds[:open_at])


def _round(one: Round) -> Point:
    values = dict(numbers({key: value for key, value in one.metrics.items() if key != "untrained_tokens"}, "round"))
    left_out = one.metrics.get("untrained_tokens") or {}
    values |= dict(numbers(left_out, "untrained_tokens"))
    if trajectories := values.get("round/trajectories"):
        sampled = values.get("round/tokens_trained", 0.0) + sum(left_out.values())
        values["round/tokens_per_trajectory"] = sampled / trajectories
    return Point(one.to_version or 0, one.ended_at or one.started_at, values)


def _decision(one: Decision) -> Point:
    note = f"{one.alias}@{one.version}: {one.action} by {one.decided_by}: {one.reason}"
    return Point(one.version, one.decided_at, dict(numbers(one.evidence, "decision")), note)


def numbers(content: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested mappings by their path, a bounded number of them."""
    for count, pair in enumerate(_numbers(content, name)):
        if count >= _MOST_VALUES:
            return
        yield pair


def _numbers(content: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        path = f"{name}/{str(key).replace('/', '_')}"
        if key == _SETTINGS:  # they do not change with the version
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, path)
        elif isinstance(value, int | float) and math.isfinite(value):
            yield path, float(value)
