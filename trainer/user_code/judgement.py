"""What a judge returns for one trajectory, as a typed record; numbers and mappings do as well (docs/judges.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge returns.

    score        a finite number of at most 1e9; higher is better
    components   name -> number, stored beside the score; at most 1,000
    explanation  why, for people; 20,000 characters are stored
    """

    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    explanation: str = ""
