"""The behavior judge: scores length, tool calls, end or format of a trajectory from 0 to 1, not its answer.

Meant as a penalty in a composite judge.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

from ratchet.store.records import Transcript
from ratchet.trainer.controller.judges import GroupJudgement
from ratchet.trainer.controller.judges.opinion import DraftVerdict, last_answer, version_of
from ratchet.trainer.controller.judges.tool_outcomes import success_share
from ratchet.trainer.settings.judge_specs import BehaviorSpec


class BehaviorJudge:
    """Applies one rule."""

    concurrency = 1

    def __init__(self, spec: BehaviorSpec, clock: Callable[[], float] = time.time) -> None:
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


def short(spec: BehaviorSpec, member: Transcript) -> float:
    """Return 1 for no sampled tokens, falling to 0 at the limit."""
    return _falling(spec.limit, sum(call.completion_tokens for call in member.calls))


def few_tool_calls(spec: BehaviorSpec, member: Transcript) -> float:
    """Return 1 for no tool calls, falling to 0 at the limit."""
    return _falling(spec.limit, sum(len(message.get("tool_calls") or ()) for message in member.messages))


def tools(spec: BehaviorSpec, member: Transcript) -> float:
    """Return the share of tool calls that are valid and did not fail; 1 without tool calls."""
    return success_share(member)


def ended(spec: BehaviorSpec, member: Transcript) -> float:
    """Return 1 if the last message is a text answer, 0 if the agent ran out of turns or wrote nothing."""
    last = member.messages[-1] if member.messages else {}
    return float(last.get("role") == "assistant" and not last.get("tool_calls") and bool(last_answer(member).strip()))


def pattern(spec: BehaviorSpec, member: Transcript) -> float:
    """Return 1 if the whole last answer matches the pattern."""
    return float(re.fullmatch(spec.pattern, last_answer(member).strip(), re.DOTALL) is not None)


def _falling(limit: int, used: int) -> float:
    return max(0.0, 1.0 - used / limit)


_RULES: Mapping[str, Callable[[BehaviorSpec, Transcript], float]] = {
    "short": short,
    "few_tool_calls": few_tool_calls,
    "tools": tools,
    "ended": ended,
    "pattern": pattern,
}
