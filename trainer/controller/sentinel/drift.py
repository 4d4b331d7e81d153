"""Drift: how the behavior of newer trajectories differs from that of older ones. Pure, on behaviors, oldest first.

Length and reasoning are compared within a task family: a change of the tasks is not drift. Coverage counts over all
trajectories: nothing is learned about a tool or a file that is never used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from ratchet.trainer.controller.sentinel.behavior import TrajectoryBehavior
from ratchet.trainer.controller.sentinel.resources import resource_coverage
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.settings.sentinel_settings import SentinelSettings
from ratchet.trainer.statistics.welch_test import MeanChange, mean_change

CHECKS = frozenset({"length_drift", "reasoning_drift", "hallucinated_arguments", "tool_coverage", "resource_coverage"})
_MIN_OFFERED = 100  # trajectories that could have used a tool or a resource, before it counts as neglected
_MIN_RESOURCES = 5


def check_drift(behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings) -> list[Finding]:
    """Return the findings of every check on behavior; none without a trajectory."""
    if not behaviors:
        return []
    past, recent = behaviors[: -settings.recent_window], behaviors[-settings.recent_window :]
    return [
        _ratio_drift(
            "length_drift", "ratchet_trajectory_tokens", _length, past, recent, settings.length_ratio, settings
        ),
        _ratio_drift(
            "reasoning_drift",
            "ratchet_reasoning_tokens_per_action",
            _reasoning,
            past,
            recent,
            settings.reasoning_ratio,
            settings,
        ),
        Finding("actions", "ratchet_actions_per_trajectory", "", statistics.fmean(one.actions for one in recent)),
        _check_hallucinated(past, recent, settings),
        *check_tool_coverage(behaviors, settings),
        check_resource_coverage(behaviors, settings),
    ]


def check_tool_coverage(behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings) -> list[Finding]:
    """Return for each tool the share of the trajectories that used it, of those that were offered it."""
    findings = []
    for tool in sorted(frozenset().union(*(one.offered for one in behaviors))):
        offered = [one for one in behaviors if tool in one.offered]
        share = sum(tool in one.used for one in offered) / len(offered)
        reason = None
        if len(offered) >= _MIN_OFFERED and share < settings.min_coverage:
            reason = (
                f"tool {tool!r} was used in {share:.1%} of the last {len(offered)} trajectories that were offered it: "
                "no task needs it, or the policy no longer uses it"
            )
        findings.append(Finding("tool_coverage", "ratchet_tool_use_ratio", tool, share, reason))
    return findings


def check_resource_coverage(behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings) -> Finding:
    """Return the share of the often shown files and other resources that tool calls named."""
    found = resource_coverage(behaviors, _MIN_OFFERED, settings.min_coverage)
    reason = None
    if found.shown >= _MIN_RESOURCES and found.share < settings.min_resource_coverage:
        reason = (
            f"{len(found.neglected)} of {found.shown} files, addresses or ids in the input of {_MIN_OFFERED} or "
            "more of "
            f"the last {len(behaviors)} trajectories are named in hardly any tool call ({found.describe_neglected()}): "
            "no task needs them, or the policy uses only a few; add tasks about them, check what the judge rewards, or "
            "lower min_resource_coverage"
        )
    return Finding("resource_coverage", "ratchet_resource_use_ratio", "", found.share, reason)


def unnecessary_tool_calls(behaviors: Sequence[TrajectoryBehavior], scores: Mapping[str, float]) -> Finding | None:
    """Return the mean number of tool calls on tasks that an attempt without tools solved as well as the best one."""
    cohorts: dict[str, list[TrajectoryBehavior]] = {}
    for one in behaviors:
        if one.trajectory_id in scores:
            cohorts.setdefault(one.cohort, []).append(one)
    solvable = [members for members in cohorts.values() if _solved_without_tools(members, scores)]
    if not solvable:
        return None
    mean = statistics.fmean(one.tool_calls for members in solvable for one in members)
    return Finding("unnecessary_tool_calls", "ratchet_unnecessary_tool_calls", "", mean)


def _solved_without_tools(members: Sequence[TrajectoryBehavior], scores: Mapping[str, float]) -> bool:
    best = max(scores[one.trajectory_id] for one in members)
    worst = min(scores[one.trajectory_id] for one in members)
    return best > worst and any(not one.tool_calls and scores[one.trajectory_id] == best for one in members)


def _check_hallucinated(
    past: Sequence[TrajectoryBehavior], recent: Sequence[TrajectoryBehavior], settings: SentinelSettings
) -> Finding:
    shares = [[one.hallucinated / one.arguments for one in side if one.arguments] for side in (past, recent)]
    now = statistics.fmean(shares[1]) if shares[1] else 0.0
    found = mean_change(shares[0], shares[1])
    reason = None
    if (
        found
        and found.after - found.before >= settings.max_hallucination_increase
        and found.sigmas >= settings.min_sigmas
    ):
        reason = (
            f"{found.after:.0%} of tool arguments occur nowhere in their context, up from {found.before:.0%}: "
            "the policy hallucinates them; check what the judge rewards"
        )
    return Finding("hallucinated_arguments", "ratchet_hallucinated_argument_ratio", "", now, reason)


def _ratio_drift(
    check: str,
    metric: str,
    measure: Callable[[TrajectoryBehavior], float],
    past: Sequence[TrajectoryBehavior],
    recent: Sequence[TrajectoryBehavior],
    limit: float,
    settings: SentinelSettings,
) -> Finding:
    now = statistics.fmean(measure(one) for one in recent)
    found: list[tuple[str, MeanChange]] = []
    for family in {one.family for one in recent}:
        values = [[measure(one) for one in side if one.family == family] for side in (past, recent)]
        moved = mean_change(values[0], values[1])
        if moved and moved.ratio >= limit and abs(moved.sigmas) >= settings.min_sigmas:
            found.append((family, moved))
    if not found:
        return Finding(check, metric, "", now)
    family, worst = max(found, key=lambda item: abs(item[1].sigmas))
    reason = (
        f"{metric.removeprefix('ratchet_').replace('_', ' ')} went from {worst.before:.0f} to {worst.after:.0f} in "
        f"{family}: does the judge reward length, or did the tasks change?"
    )
    return Finding(check, metric, "", now, reason)


def _length(one: TrajectoryBehavior) -> float:
    return float(one.sampled_tokens)


def _reasoning(one: TrajectoryBehavior) -> float:
    return one.reasoning_tokens / max(1, one.actions)
