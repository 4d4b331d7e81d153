"""Roles: which part of a multi-agent system a call plays, and which parts train.

A call plays the role that its agent named (`x-ratchet-role`), else the first whose pattern is found in its system
prompt, else none. Where roles are chosen, only their calls are trained: what other roles sampled is context or left
out, never loss. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ratchet.store.records import Call

UNTRAINED_ROLE = "other_role"  # why the tokens of a call are not trained
_LONGEST = 4000  # characters of a system prompt that are looked at


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles that train (none named: all do), and the patterns of system prompts by role."""

    train: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)

    def trains(self, role: str | None) -> bool:
        """Whether the tokens of this role may carry loss."""
        return not self.train or role in self.train

    def named(self, calls: Sequence[Call], system_prompt: Callable[[str], str]) -> tuple[Call, ...]:
        """Return the calls, each with its role; `system_prompt` tells, of a prompt's node, what it begins with."""
        if not self.prompts:
            return tuple(calls)
        return tuple(
            call
            if call.role
            else msgspec.structs.replace(call, role=self._role_by_prompt(system_prompt(call.prompt_node)))
            for call in calls
        )

    def _role_by_prompt(self, prompt: str) -> str | None:
        text = prompt[:_LONGEST]
        return next((role for role, pattern in self.prompts.items() if re.search(pattern, text)), None)
