"""The sentinel: is what comes in and goes out of training sound? Pure checks on frozen records, and one watcher.

A check takes records and returns findings, healthy ones included, so that every number is a metric. It reads nothing,
knows no clock and no store. `watch.py` alone does: it feeds the checks, raises and clears alarms, and holds training.
"""

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
