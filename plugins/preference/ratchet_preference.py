"""Preference losses: `learner.loss_type: dpo` and `apo_zero_unpaired`. Pure.

They compare whole trajectories under the policy and the base model. h is log p minus the base model's log p, summed
over the answers of a trajectory:

    dpo                 - log sigmoid(beta (h_best - h_worst)), mean over pairs of the best and the worst trajectory of
                        each group. Rafailov et al. 2023, "Direct preference optimization", equation 7
                        (arXiv:2305.18290)
    apo_zero_unpaired   1 - sigmoid(beta h) for a trajectory with a positive advantage, sigmoid(beta h) for one with a
                        negative advantage, mean over trajectories. D'Oosterlinck et al. 2024, "Anchored preference
                        optimization", equation 7 (arXiv:2408.06266), as in TRL's KTOTrainer without pairs

The gradient of both is that of a sum of w log p over the answers' tokens, where w follows from the current h. Each
optimizer step computes h first and is then an SFT step with these weights, which is exact. Only the sign and the order
of advantages count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.objectives import Objective, Preference

# From the rows of a group or trajectory, h by trajectory and beta to the weight by trajectory and the loss.
_WeightsOf = Callable[[Sequence[TokenRow], Mapping[str, float], float], tuple[dict[str, float], float] | None]


def _objective(weights_of: _WeightsOf, *, of_groups: bool) -> Objective:
    def units(rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
        by_unit: dict[str, list[TokenRow]] = {}
        for row in rows:
            by_unit.setdefault(row.group if of_groups else row.trajectory_id, []).append(row)
        return [members for members in by_unit.values() if weights_of(members, {}, 1.0) is not None]

    def weighted_rows(rows: Sequence[TokenRow], gaps: Sequence[float], beta: float) -> tuple[list[TokenRow], float]:
        h: dict[str, float] = {}
        for row, gap in zip(rows, gaps, strict=True):
            h[row.trajectory_id] = h.get(row.trajectory_id, 0.0) + gap
        kept: list[tuple[TokenRow, float]] = []
        losses: list[float] = []
        for members in units(rows):
            if (found := weights_of(members, h, beta)) is None:
                continue
            weights, loss = found
            losses.append(loss)
            kept += [(row, weights[row.trajectory_id]) for row in members if row.trajectory_id in weights]
        tokens = sum(row.tokens_trained for row, _ in kept)  # the mean of the SFT loss divides by it
        scale = tokens / max(len(losses), 1)
        plain = [
            replace(row, advantage=w * scale, advantages=None, temperature=1.0, truncation=None, importance=False)
            for row, w in kept
        ]
        return plain, fmean(losses) if losses else 0.0

    return Objective(
        "weight", "none", "tokens", 0.2, 1.0, preference=Preference(of_groups, units, weighted_rows)
    )  # fmt: skip


def _paired(members: Sequence[TokenRow], h: Mapping[str, float], beta: float) -> tuple[dict[str, float], float] | None:
    ranked = sorted({row.trajectory_id: row.advantage for row in members}.items(), key=lambda one: one[1])
    (worst, lowest), (best, highest) = ranked[0], ranked[-1]
    if not members[0].group or highest <= lowest:
        return None
    z = beta * (h.get(best, 0.0) - h.get(worst, 0.0))
    weight = beta * _sigmoid(-z)
    return {best: weight, worst: -weight}, -math.log(max(_sigmoid(z), 1e-300))


def _unpaired(
    members: Sequence[TokenRow], h: Mapping[str, float], beta: float
) -> tuple[dict[str, float], float] | None:
    name, advantage = members[0].trajectory_id, members[0].advantage
    if not advantage:
        return None
    likelihood = _sigmoid(beta * h.get(name, 0.0))
    slope = beta * likelihood * (1 - likelihood)
    return ({name: slope}, 1 - likelihood) if advantage > 0 else ({name: -slope}, likelihood)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


DPO = _objective(_paired, of_groups=True)
APO_ZERO_UNPAIRED = _objective(_unpaired, of_groups=False)
