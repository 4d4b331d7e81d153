"""The finding of a check: a number, its alarm, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check measured about one subject.

    check            name of the check and of its alarm
    metric           the metric that shows the value
    subject          the tool or task family, "" for the whole alias
    value            the measurement
    reason           why it is an alarm, in one sentence with the remedy; None if there is no problem
    blocks_training  whether training waits until it is gone
    blocks_release   whether no version is promoted without an approval
    """

    check: str
    metric: str
    subject: str
    value: float
    reason: str | None = None
    blocks_training: bool = False
    blocks_release: bool = False
