"""What a check found: a number, its alarm, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found of one subject.

    check    name of the check and of its alarm
    metric   the metric that shows the value
    subject  the tool or task family that it is about, "" for the whole alias
    value    what was measured
    reason   why it is an alarm, in one sentence with the remedy; None where all is well
    holds    whether training should wait until it is gone
    doubts   whether a person should look before any version is promoted
    """

    check: str
    metric: str
    subject: str
    value: float
    reason: str | None = None
    holds: bool = False
    doubts: bool = False
