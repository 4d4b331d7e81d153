"""What a check of `ratchet doctor` found, and its remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One proof: what was seen, or why it failed and what to do."""

    name: str
    passed: bool
    seen: str
    remedy: str = ""

    def line(self) -> str:
        """The finding for people."""
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name:<9} {self.seen}" + (f"\n      remedy: {self.remedy}" if self.remedy else "")

    def as_data(self) -> dict[str, Any]:
        """The finding as plain data."""
        return asdict(self)
