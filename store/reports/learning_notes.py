"""The notes of the learning report: what is missing to decide, and why an interval is wide. Pure.

The number of scores that would decide assumes the current difference and spread. Earlier versions get no further
scores, so only the newest version's can grow; if that cannot decide, a side-by-side comparison is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ratchet.store.reports.policy_movement import Movement, describe_stall

if TYPE_CHECKING:
    from ratchet.store.reports.learning_comparison import FamilyReport, Gain, Side, VersionScore

MAX_MORE_SCORES = 100_000  # a larger number is not worth waiting for


def more_scores(difference: float, before: float, after: float, count: int, z: float) -> int | None:
    """Return how many scores, besides `count`, exclude zero from the interval; None if no number does.

    `before` and `after`: squared standard errors of the two means; `z`: half-width of the interval in standard errors.
    """
    left = (difference / z) ** 2 - before
    if left <= 0:
        return None
    more = max(0, math.ceil(after * count / left) - count)
    return more if more <= MAX_MORE_SCORES else None


def describe_gaps(
    whole: FamilyReport, versions: Sequence[VersionScore], enough: int, newest_first: Sequence[Movement]
) -> tuple[str, ...]:
    """Return the notes on a comparison of all traffic."""
    return tuple(_notes(whole, versions, enough, newest_first))


def _notes(
    whole: FamilyReport, versions: Sequence[VersionScore], enough: int, newest_first: Sequence[Movement]
) -> Iterator[str]:
    if whole.gain.verdict == "unknown":
        yield _undecided(whole)
    yield _pooled("before", whole.before, versions, enough)
    yield _pooled("after", whole.after, versions, enough)
    between = [one for one in versions if whole.before.last_version < one.version < whole.after.first_version]
    if between:
        own = _range(between[0].version, between[-1].version)
        yield f"left out: {own}, between the two sides"
    if whole.same_tasks is not None and _is_wide(whole.same_tasks, whole.gain):
        yield _few_tasks(whole.same_tasks)
    if whole.gain.verdict != "better" and (stall := describe_stall(newest_first)) is not None:
        yield stall


def _undecided(whole: FamilyReport) -> str:
    newest = _range(whole.after.first_version, whole.after.last_version)
    if whole.more_scores is not None:
        scores = f"about {whole.more_scores} more scores of {newest}" if whole.more_scores else "a few more scores"
        return f"missing: {scores}, if the difference stays {whole.gain.value:+.3f} and scores spread as they do"
    oldest = _range(whole.before.first_version, whole.before.last_version)
    return (
        f"missing: a larger difference, or more scores on both sides: {whole.gain.value:+.3f} is too small for the "
        f"{whole.before.count} scores of {oldest}, however many follow; `ratchet eval` compares two versions side by "
        "side"
    )


def _pooled(name: str, side: Side, versions: Sequence[VersionScore], enough: int) -> str:
    own = _range(side.first_version, side.last_version)
    if side.first_version == side.last_version:
        which = "oldest" if name == "before" else "newest"
        return f"{name}: {own} alone, the {which}, has the {enough} scores that a side needs"
    end = side.first_version if name == "before" else side.last_version
    count = next(one.count for one in versions if one.version == end)
    return f"{name}: {own} together, since @{end} alone has {count} scores and a side needs {enough}"


def _is_wide(same_tasks: Gain, whole: Gain) -> bool:
    return same_tasks.high - same_tasks.low > 1.5 * (whole.high - whole.low)


def _few_tasks(gain: Gain) -> str:
    text = (
        f"on the same tasks the interval is wide because there are {gain.count}: each counts once, however many scores "
        "it has"
    )
    if gain.verdict != "unknown" or not gain.value:
        return text
    reach = (gain.high - gain.low) / 2
    return f"{text}; about {math.ceil(gain.count * (reach / gain.value) ** 2)} tasks would decide at this spread"


def _range(first: int, last: int) -> str:
    return f"@{first}" if first == last else f"@{first} to @{last}"
