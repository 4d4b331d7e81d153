"""Tool health: whether a tool fails more often than before. Pure.

Only calls that match their tool's schema count: a misspelt argument is a failure of the policy, not of the environment.
A tool call fails if its result is an error, a timeout or empty. Within one version the policy does not change, so an
increase within it comes from the environment and pauses training. An increase that comes with a version may come from
either; it raises an alarm without a pause. A tool that fails almost always pauses training whatever its history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ratchet.store.records import ToolCall
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.settings.trainer_sections import SentinelSettings
from ratchet.trainer.statistics import MIN_SIGMAS, MIN_VALUES, share_change

CHECK = "tool_health"
METRIC = "ratchet_tool_failure_ratio"
TOOL_WINDOW = 50  # newest results of a tool, compared with its earlier ones
_MAX_FAILURE_INCREASE = 0.3  # of a tool's failure rate over its history
VALID_OUTCOMES = (ToolOutcome.VALID, ToolOutcome.UNCHECKED)


@dataclass(frozen=True, slots=True)
class ToolHistory:
    """The earlier failures and calls of a tool, and whether the same policy versions made them."""

    failures: int
    calls: int
    same_versions: bool


def check_tool_health(
    newest: Sequence[ToolCall], settings: SentinelSettings, known: Mapping[str, ToolHistory] | None = None
) -> tuple[list[Finding], dict[str, ToolHistory]]:
    """Return one finding per tool, and the histories they were compared with.

    `newest` are answered tool calls, newest first. `known` holds the histories of the tools that failed at the last
    check: they are compared with the same history again, or a long failure would become its own baseline.
    """
    findings, histories = [], {}
    for tool, calls in _by_tool(newest).items():
        recent, earlier = calls[:TOOL_WINDOW], calls[TOOL_WINDOW:]
        if len(recent) < MIN_VALUES:
            continue
        history = (known or {}).get(tool) or _history(recent, earlier)
        histories[tool] = history
        findings.append(_finding(tool, recent, history, settings))
    return findings, histories


def _by_tool(newest: Iterable[ToolCall]) -> dict[str, list[ToolCall]]:
    tools: dict[str, list[ToolCall]] = {}
    for call in newest:
        if call.result is not None and call.outcome in VALID_OUTCOMES:
            tools.setdefault(call.tool, []).append(call)
    return tools


def _history(recent: Sequence[ToolCall], earlier: Sequence[ToolCall]) -> ToolHistory:
    versions = {call.version for call in recent}
    same = [call for call in earlier if call.version in versions]
    chosen = same if len(same) >= MIN_VALUES else earlier
    return ToolHistory(sum(map(_fails, chosen)), len(chosen), chosen is same)


def _fails(call: ToolCall) -> bool:
    return call.result is not ToolResult.OK


def _finding(tool: str, recent: Sequence[ToolCall], history: ToolHistory, settings: SentinelSettings) -> Finding:
    failures = sum(map(_fails, recent))
    share = failures / len(recent)
    change = share_change((history.failures, history.calls), (failures, len(recent)))
    classes = Counter(str(call.result) for call in recent if _fails(call))
    results = ", ".join(f"{count} {name}" for name, count in classes.most_common())
    failing = f"tool {tool!r} failed in {failures} of its last {len(recent)} calls ({results})"
    if len(recent) >= TOOL_WINDOW and share >= settings.max_tool_failure_rate:
        return Finding(CHECK, METRIC, tool, share, f"{failing}: fix the tool, or raise max_tool_failure_rate", True)
    if change is not None and change.after - change.before >= _MAX_FAILURE_INCREASE and change.sigmas >= MIN_SIGMAS:
        before = f"{failing}, up from {change.before:.0%}"
        if history.same_versions:
            return Finding(CHECK, METRIC, tool, share, f"{before} under the same version: fix the tool", True)
        newest = recent[0].version
        return Finding(CHECK, METRIC, tool, share, f"{before}: it began with version {newest}; check both")
    return Finding(CHECK, METRIC, tool, share)
