"""Tool health: does a tool fail more than it did? Pure.

Only calls that fit their tool's schema count: a misspelt argument is the policy's failure, not the environment's. A
tool fails where its result is an error, a timeout or empty. Within one policy version the policy does not change, so a
rise within it is the environment's and holds training. A rise that comes with a version may be either: it is told and
does not hold. A tool that hardly ever works holds whatever its past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ratchet.store.records.tool_calls import ToolCall
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.settings.sentinel_settings import SentinelSettings
from ratchet.trainer.statistics.welch_test import LEAST, share_change

CHECK = "tool_health"
METRIC = "ratchet_tool_failure_ratio"
_FITTING = (ToolOutcome.VALID, ToolOutcome.UNCHECKED)


@dataclass(frozen=True, slots=True)
class ToolHistory:
    """How a tool did before: (failures, calls), and whether under the very versions that call it now."""

    failures: int
    calls: int
    same_versions: bool


def tool_health(
    newest: Sequence[ToolCall], settings: SentinelSettings, kept: Mapping[str, ToolHistory] | None = None
) -> tuple[list[Finding], dict[str, ToolHistory]]:
    """Return one finding per tool, and the pasts that it was compared with.

    `newest` are answered tool calls, newest first. `kept` are the pasts of tools that were sick at the last look: they
    go on being compared with those, or a long sickness would become its own past.
    """
    findings, pasts = [], {}
    for tool, calls in _by_tool(newest).items():
        recent, earlier = calls[: settings.tool_window], calls[settings.tool_window :]
        if len(recent) < LEAST:
            continue
        past = (kept or {}).get(tool) or _past(recent, earlier)
        pasts[tool] = past
        findings.append(_finding(tool, recent, past, settings))
    return findings, pasts


def _by_tool(newest: Iterable[ToolCall]) -> dict[str, list[ToolCall]]:
    tools: dict[str, list[ToolCall]] = {}
    for call in newest:
        if call.result is not None and call.outcome in _FITTING:
            tools.setdefault(call.tool, []).append(call)
    return tools


def _past(recent: Sequence[ToolCall], earlier: Sequence[ToolCall]) -> ToolHistory:
    versions = {call.version for call in recent}
    same = [call for call in earlier if call.version in versions]
    chosen = same if len(same) >= LEAST else earlier
    return ToolHistory(sum(map(_fails, chosen)), len(chosen), chosen is same)


def _fails(call: ToolCall) -> bool:
    return call.result is not ToolResult.OK


def _finding(tool: str, recent: Sequence[ToolCall], past: ToolHistory, settings: SentinelSettings) -> Finding:
    failures = sum(map(_fails, recent))
    share = failures / len(recent)
    risen = share_change((past.failures, past.calls), (failures, len(recent)))
    classes = Counter(str(call.result) for call in recent if _fails(call))
    told = ", ".join(f"{count} {name}" for name, count in classes.most_common())
    failing = f"tool {tool!r} failed in {failures} of its last {len(recent)} calls ({told})"
    if len(recent) >= settings.tool_window and share >= settings.max_tool_failure_rate:
        return Finding(CHECK, METRIC, tool, share, f"{failing}: mend the tool, or raise max_tool_failure_rate", True)
    if (
        risen is not None
        and risen.after - risen.before >= settings.max_tool_failure_increase
        and risen.sigmas >= settings.min_sigmas
    ):
        before = f"{failing}, before in {risen.before:.0%}"
        if past.same_versions:
            return Finding(CHECK, METRIC, tool, share, f"{before} under the same version: mend the tool", True)
        newest = recent[0].version
        return Finding(CHECK, METRIC, tool, share, f"{before}: it began with version {newest}; look at both")
    return Finding(CHECK, METRIC, tool, share)
