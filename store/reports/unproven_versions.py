"""Unproven versions: they serve nobody because their proof could not decide; how many there are, why, and what helps.

The alarm, `ratchet status` and the learning report say it in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.store.records import BASE_VERSION
from ratchet.store.states import PolicyAction

if TYPE_CHECKING:
    from ratchet.store.store import Store

REMEDY = (
    "let vLLM and the learner compute in one number format (vllm.dtype, learner.dtype) and from the same base model, "
    "and restart a replica that serves another adapter"
)


@dataclass(frozen=True, slots=True)
class UnprovenVersions:
    """The unproven versions of an alias that are newer than its live one, and the proof's reason for the newest."""

    alias: str
    versions: tuple[int, ...]  # oldest first
    live: int
    reason: str

    def describe(self) -> str:
        """Return their number, the reason and the remedies."""
        count, newest = len(self.versions), f"{self.alias}@{self.versions[-1]}"
        named = f"{newest} serves nobody" if count == 1 else f"@{self.versions[0]} to {newest} serve nobody"
        return (
            f"{count} version{'s' * (count > 1)} unproven: {self.reason}; {named}, and training waits once "
            f"trainer.max_staleness versions are ahead of the live one. To mend it, {REMEDY}; `ratchet doctor` "
            f"compares both sides. `ratchet policies promote {newest} --reason WHY` releases it without a proof, "
            f"`ratchet policies rollback {self.alias}@{self.live} --reason WHY` discards what was trained since"
        )


def read_unproven(store: Store, alias: str) -> UnprovenVersions | None:
    """Return the unproven versions of an alias; None if there are none."""
    found = store.policies.list_unproven(alias)
    if not found:
        return None
    decisions = store.decisions.decisions_of(alias, found[-1].version)
    reason = next((one.reason for one in decisions if one.action is PolicyAction.UNPROVEN), "no reason is recorded")
    live = store.policies.live().get(alias)
    return UnprovenVersions(
        alias, tuple(policy.version for policy in found), live.version if live is not None else BASE_VERSION, reason
    )
