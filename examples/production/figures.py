"""Figures of a stream: the share of content users at its start and end with 95% intervals, and the feedback.

"Content" is the true opinion of the users, expressed or not; the server only knows the thumbs. Intervals: Wilson's for
a share, Newcombe's for a difference of two shares. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from examples.production.stream import Served
from examples.production.users import UP

_Z = 1.959964


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share."""
    if count == 0:
        return 0.0, 1.0
    share, extra = successes / count, _Z**2 / count
    middle = (share + extra / 2) / (1 + extra)
    half = _Z * math.sqrt(share * (1 - share) / count + extra / (4 * count)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)


def gain(before: tuple[int, int], after: tuple[int, int]) -> tuple[float, float, float]:
    """Return (difference, low, high) of two shares, each given as (successes, count)."""
    first, second = before[0] / max(1, before[1]), after[0] / max(1, after[1])
    low_before, high_before = wilson(*before)
    low_after, high_after = wilson(*after)
    value = second - first
    low = value - math.hypot(second - low_after, high_before - first)
    return value, low, value + math.hypot(high_after - second, first - low_before)


def figures(served: Sequence[Served], parts: int = 8) -> dict[str, Any]:
    """Return the figures: the stream in `parts`, the last part against the first, and the feedback."""
    size = max(1, len(served) // parts)
    pieces = [served[start : start + size] for start in range(0, size * parts, size)]
    described = [piece for piece in map(_piece, pieces) if piece["users"]]
    first, last = pieces[0], [piece for piece in pieces if piece][-1]
    value, low, high = gain(_content(first), _content(last))
    return {
        "users": len(served),
        "errors": sum(one.rollout.end == "api_error" for one in served),
        "parts": described,
        "gain": {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)},
        "feedback": _feedback(served),
    }


def _piece(piece: Sequence[Served]) -> dict[str, Any]:
    content, users = _content(piece)
    ups = [one.thumbs[-1].value == UP for one in piece if one.thumbs]
    low, high = wilson(content, users)
    return {
        "users": users,
        "content": round(content / max(1, users), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "thumbs_up": round(sum(ups) / max(1, len(ups)), 4),
        "models": sorted({model for one in piece for model in one.rollout.models}),
    }


def _content(piece: Sequence[Served]) -> tuple[int, int]:
    return sum(one.rollout.success for one in piece), len(piece)


def _feedback(served: Sequence[Served]) -> dict[str, int]:
    feedback = [one.thumbs for one in served if one.thumbs]
    sources = [{thumb.end_user for thumb in thumbs} for thumbs in feedback]
    return {
        "thumbs": sum(map(len, feedback)),
        "silent": len(served) - len(feedback),
        "revised": sum(len(thumbs) > len(who) for thumbs, who in zip(feedback, sources, strict=True)),
        "contradicted": sum(len(who) > 1 for who in sources),
        "mistaken": sum(
            (one.thumbs[0].value == UP) != one.rollout.success
            and all(thumb.value == one.thumbs[0].value for thumb in one.thumbs if thumb.end_user == one.visit.user)
            for one in served
            if one.thumbs
        ),
    }
