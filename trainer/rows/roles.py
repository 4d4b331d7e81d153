"""Roles: the parts of a multi-agent system, and which of them are trained. Pure.

The role of a call is the one in its `x-ratchet-role` header, else the first one whose pattern matches its system
prompt, else none. If roles are configured, only their calls carry loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ratchet.store.records import Call

UNTRAINED_ROLE = "other_role"  # reason for untrained tokens
_MAX_PROMPT_CHARS = 4000  # of a system prompt that patterns are matched against


@dataclass(frozen=True, slots=True)
class Roles:
    """The trained roles (empty: all), and the system-prompt patterns by role."""

    train: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)

    def trains(self, role: str | None) -> bool:
        """Return whether the tokens of this role may carry loss."""
        return not self.train or role in self.train

    def named(self, calls: Sequence[Call], system_prompt: Callable[[str], str]) -> tuple[Call, ...]:
        """Return the calls with their roles; `system_prompt` returns the system prompt of a prompt node."""
        if not self.prompts:
            return tuple(calls)
        return tuple(
            call
            if call.role
            else msgspec.structs.replace(call, role=self._role_by_prompt(system_prompt(call.prompt_node)))
            for call in calls
        )

    def _role_by_prompt(self, prompt: str) -> str | None:
        text = prompt[:_MAX_PROMPT_CHARS]
        return next((role for role, pattern in self.prompts.items() if re.search(pattern, text)), None)
