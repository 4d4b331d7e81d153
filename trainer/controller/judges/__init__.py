"""Judges: one protocol, one verdict per trajectory.

A judge never turns its own trouble into a number: whatever goes wrong is a verdict with a `failure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ratchet.store.records import JudgeRequest, Transcript, Verdict

__all__ = ["Judge", "Judgement"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge said of a group: one verdict per member, in order, and what it exchanged with others for them."""

    verdicts: tuple[Verdict, ...]
    judge_requests: tuple[JudgeRequest, ...] = ()


class Judge(Protocol):
    """Something that scores the members of a group."""

    @property
    def name(self) -> str:
        """What people call it, such as `my_rules:judge`."""

    @property
    def version(self) -> str:
        """A hash of its code and rubric: verdicts of different versions are not comparable."""

    @property
    def concurrency(self) -> int:
        """How many groups it may be given at the same time, each in a thread of its own."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> Judgement:
        """Return one verdict per member, in order; failures are verdicts too. Never raises for a bad answer."""

    def close(self) -> None:
        """Let go of connections; it judges no more."""
