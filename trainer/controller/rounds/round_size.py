"""Round size: how many groups a round counts for, and how large a step it therefore takes. Pure.

AdamW moves the weights by about its learning rate whatever the gradient's size, so that a round of one trajectory would
move them as far as one of 128. A smaller round takes sqrt(n / wanted) of the rate: the noise that AdamW adds for each
sample is then the same whether samples come in small rounds or in whole ones (Malladi et al. 2022, "On the SDEs and
Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.store.records import Group


@dataclass(frozen=True, slots=True)
class RoundSize:
    """The groups that make a whole round, and the members that make a whole group."""

    groups_per_round: int
    num_generations: int

    def weight(self, groups: Sequence[Group]) -> float:
        """Return how many groups these count for: a single is one member of one."""
        return sum(1.0 if len(group.members) > 1 else 1.0 / self.num_generations for group in groups)

    def rate_scale(self, groups: Sequence[Group]) -> float:
        """Return the share of the learning rate that a round of these groups takes, at most 1."""
        return math.sqrt(min(1.0, self.weight(groups) / self.groups_per_round))
