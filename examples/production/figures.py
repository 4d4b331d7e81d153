"""Figures of a stream: how content its users were at the beginning and at the end, with 95% intervals, and the thumbs.

Content is what the users found, whether they said it or not; the share of thumbs up is what the server could know. The
interval of a share is Wilson's, of a difference of two shares Newcombe's. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from examples.production.stream import Served
from examples.production.users import UP

_Z = 1.959964


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share."""
    if count == 0:
        return 0.0, 1.0
    share, extra = successes / count, _Z**2 / count
    middle = (share + extra / 2) / (1 + extra)
    half = _Z * math.sqrt(share * (1 - share) / count + extra / (4 * count)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)


def gain(before: tuple[int, int], after: tuple[int, int]) -> tuple[float, float, float]:
    """(difference, low, high) of two shares, each given as (successes, count)."""
    first, second = before[0] / max(1, before[1]), after[0] / max(1, after[1])
    low_before, high_before = wilson(*before)
    low_after, high_after = wilson(*after)
    value = second - first
    low = value - math.hypot(second - low_after, high_before - first)
    return value, low, value + math.hypot(high_after - second, first - low_before)


def figures(served: Sequence[Served], parts: int = 8) -> dict[str, Any]:
    """What the run prints: the stream in `parts`, the first against the last, and what was said."""
    size = max(1, len(served) // parts)
    pieces = [served[start : start + size] for start in range(0, size * parts, size)]
    told = [piece for piece in map(_piece, pieces) if piece["users"]]
    first, last = pieces[0], [piece for piece in pieces if piece][-1]
    value, low, high = gain(_content(first), _content(last))
    return {
        "users": len(served),
        "errors": sum(one.rollout.end == "api_error" for one in served),
        "parts": told,
        "gain": {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)},
        "feedback": _feedback(served),
    }


def _piece(piece: Sequence[Served]) -> dict[str, Any]:
    content, users = _content(piece)
    said = [one.thumbs[-1].value == UP for one in piece if one.thumbs]
    low, high = wilson(content, users)
    return {
        "users": users,
        "content": round(content / max(1, users), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "thumbs_up": round(sum(said) / max(1, len(said)), 4),
        "models": sorted({model for one in piece for model in one.rollout.models}),
    }


def _content(piece: Sequence[Served]) -> tuple[int, int]:
    return sum(one.rollout.success for one in piece), len(piece)


def _feedback(served: Sequence[Served]) -> dict[str, int]:
    spoken = [one.thumbs for one in served if one.thumbs]
    sources = [{thumb.end_user for thumb in said} for said in spoken]
    return {
        "thumbs": sum(map(len, spoken)),
        "silent": len(served) - len(spoken),
        "revised": sum(len(said) > len(who) for said, who in zip(spoken, sources, strict=True)),
        "contradicted": sum(len(who) > 1 for who in sources),
        "mistaken": sum(
            (one.thumbs[0].value == UP) != one.rollout.success
            and all(thumb.value == one.thumbs[0].value for thumb in one.thumbs if thumb.end_user == one.visit.user)
            for one in served
            if one.thumbs
        ),
    }
