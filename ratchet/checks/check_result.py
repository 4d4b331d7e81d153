"""The result of one check of `ratchet doctor`, with a remedy if it failed, and remedies of several checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ratchet.settings.project_settings import Settings

NO_PROJECT = "start the project with `ratchet up --detach`, then run `ratchet doctor` again"


def see_log(settings: Settings, service: str) -> str:
    """Return the remedy that names a service's log."""
    return f"look at {settings.state.log(service)}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result: the observation, or the reason of the failure and the remedy."""

    name: str
    passed: bool
    seen: str
    remedy: str = ""

    def line(self) -> str:
        """Return the result as text."""
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name:<9} {self.seen}" + (f"\n      remedy: {self.remedy}" if self.remedy else "")

    def as_data(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)
