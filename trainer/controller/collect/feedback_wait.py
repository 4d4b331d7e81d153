"""FeedbackWait: whether a judge needs the word of people, how long a trajectory waits for it, and what then. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ratchet.trainer.settings.judge_specs import DROP, CompositeSpec, FeedbackSpec, JudgeSpec


@dataclass(frozen=True, slots=True)
class FeedbackWait:
    """Wait `within_seconds` after the last call; then a silent trajectory is dropped, or judged all the same."""

    within_seconds: float
    drops: bool


def feedback_wait_of(spec: JudgeSpec) -> FeedbackWait | None:
    """Return the patience that a judge asks for: of several parts the longest; None where it needs nobody's word."""
    asked = _feedback_specs(spec)
    if not asked:
        return None
    return FeedbackWait(max(one.within_seconds for one in asked), any(one.missing == DROP for one in asked))


def _feedback_specs(spec: JudgeSpec) -> list[FeedbackSpec]:
    if isinstance(spec, FeedbackSpec):
        return [spec]
    if isinstance(spec, CompositeSpec):
        return [found for part in spec.parts for found in _feedback_specs(part.judge)]
    return []
