"""FeedbackWait: whether a judge needs human feedback, how long a trajectory waits for it, and what happens then.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratchet.trainer.settings.judge_specs import DROP, ByFamilySpec, CompositeSpec, FeedbackSpec, JudgeSpec


@dataclass(frozen=True, slots=True)
class FeedbackWait:
    """Wait `within_seconds` after the last call; then drop a trajectory without feedback, or judge it without."""

    within_seconds: float
    drops: bool


def feedback_wait_of(spec: JudgeSpec) -> FeedbackWait | None:
    """Return the wait that a judge needs, of several parts the longest; None if it needs no feedback."""
    specs = _feedback_specs(spec)
    if not specs:
        return None
    return FeedbackWait(max(one.within_seconds for one in specs), any(one.missing == DROP for one in specs))


def _feedback_specs(spec: JudgeSpec) -> list[FeedbackSpec]:
    if isinstance(spec, FeedbackSpec):
        return [spec]
    if isinstance(spec, CompositeSpec):
        return [found for part in spec.parts for found in _feedback_specs(part.judge)]
    if isinstance(spec, ByFamilySpec):
        return [found for judge in spec.all for found in _feedback_specs(judge)]
    return []
