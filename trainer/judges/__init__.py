"""Judges: one protocol, one verdict per trajectory.

A judge never turns its own trouble into a number: whatever goes wrong is a verdict with a `failure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from store.records import Transcript, Verdict

__all__ = ["Judge"]


class Judge(Protocol):
    """Something that scores the members of a group."""

    @property
    def name(self) -> str:
        """What people call it, such as `my_rules:judge`."""

    @property
    def version(self) -> str:
        """A hash of its code and rubric: verdicts of different versions are not comparable."""

    def judge(self, group_id: str, members: Sequence[Transcript]) -> list[Verdict]:
        """Return one verdict per member, in order; failures are verdicts too. Never raises for a bad answer."""
