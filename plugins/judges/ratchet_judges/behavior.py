"""The behavior judge: scores length, tool calls, end or format of a trajectory from 0 to 1, not its answer.

Meant as a penalty in a composite judge.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ratchet.store.records import Transcript
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.trainer.judges.judgement import DraftVerdict, GroupJudgement, last_answer, version_of
from ratchet.trainer.judges.transcript_json import used_tool_calls
from ratchet.trainer.settings.judge_specs import JudgeSettings, JudgeTraits

# A pattern that matches all of these matches every response.
_PATTERN_PROBES = ("", "x", "7", "no idea", "The answer is 42.", "{}", "a\nb", "ü" * 50, "<answer>Oslo</answer>")
_INVALID = frozenset(ToolOutcome) - {ToolOutcome.VALID, ToolOutcome.UNCHECKED}
_FAILED = (ToolResult.ERROR, ToolResult.TIMEOUT)


class BehaviorSettings(JudgeSettings):
    """A rule about the trajectory's behavior, from 0 (bad) to 1 (good). One that scores all alike is refused."""

    rule: Literal["short", "few_tool_calls", "tools", "ended", "pattern"] = Field(description="what the rule measures")
    limit: int = Field(
        1024, ge=1, description="number of sampled tokens (short) or tool calls (few_tool_calls) that scores 0"
    )
    pattern: str = Field("", description="with pattern: regular expression that the whole last response must match")

    @model_validator(mode="after")
    def _can_differ(self) -> Self:
        if self.rule == "pattern" and not self.pattern:
            raise ValueError("rule pattern needs `pattern`, a regular expression")
        if self.rule == "short" and self.limit == 1:
            raise ValueError(
                "rule short with limit 1 scores every trajectory 0; set limit to the longest good length in tokens"
            )
        try:
            expression = re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        if self.rule == "pattern" and all(map(expression.fullmatch, _PATTERN_PROBES)):
            raise ValueError(
                f"pattern {self.pattern!r} matches every response; use a pattern that only a good response matches"
            )
        return self


class BehaviorJudge:
    """Applies one rule. Raises JudgeError for wrong settings."""

    concurrency = 1
    traits: ClassVar[JudgeTraits] = JudgeTraits(rates_behavior=True)

    def __init__(
        self, settings: Mapping[str, Any], environ: Mapping[str, str], clock: Callable[[], float] = time.time
    ) -> None:
        spec = BehaviorSettings.of_plugin("behavior", settings)
        self._clock = clock
        self._rule = _RULES[spec.rule]
        self._spec = spec
        self.name = f"behavior:{spec.rule}"
        self.version = version_of(spec.model_dump_json())

    def close(self) -> None:
        """Do nothing."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        now = self._clock()
        return GroupJudgement(
            tuple(
                DraftVerdict.of(self._rule(self._spec, member)).verdict(
                    member, group_id, judge=self.name, version=self.version, judged_at=now
                )
                for member in members
            )
        )


def short(spec: BehaviorSettings, member: Transcript) -> float:
    """Return 1 for no sampled tokens, falling to 0 at the limit."""
    return _falling(spec.limit, sum(call.completion_tokens for call in member.calls))


def few_tool_calls(spec: BehaviorSettings, member: Transcript) -> float:
    """Return 1 for no tool calls, falling to 0 at the limit."""
    return _falling(spec.limit, sum(len(message.get("tool_calls") or ()) for message in member.messages))


def tools(spec: BehaviorSettings, member: Transcript) -> float:
    """Return the share of tool calls that are valid and did not fail; 1 without tool calls."""
    calls = used_tool_calls(member)
    successes = sum(one.outcome not in _INVALID and one.result not in _FAILED for one in calls)
    return successes / len(calls) if calls else 1.0


def ended(spec: BehaviorSettings, member: Transcript) -> float:
    """Return 1 if the last message is a text answer, 0 if the agent ran out of turns or wrote nothing."""
    last = member.messages[-1] if member.messages else {}
    return float(last.get("role") == "assistant" and not last.get("tool_calls") and bool(last_answer(member).strip()))


def pattern(spec: BehaviorSettings, member: Transcript) -> float:
    """Return 1 if the whole last answer matches the pattern."""
    return float(re.fullmatch(spec.pattern, last_answer(member).strip(), re.DOTALL) is not None)


def _falling(limit: int, used: int) -> float:
    return max(0.0, 1.0 - used / limit)


_RULES: Mapping[str, Callable[[BehaviorSettings, Transcript], float]] = {
    "short": short,
    "few_tool_calls": few_tool_calls,
    "tools": tools,
    "ended": ended,
    "pattern": pattern,
}
