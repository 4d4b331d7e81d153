"""Preferences: what a trajectory's tokens weigh where the loss compares whole answers with the base model's own taste.

With h = log p(answers) - log p(answers) under the base model, summed over a trajectory's answers, and beta how far the
policy may go:

    dpo                 - log sigmoid(beta (h_best - h_worst)), mean over pairs: the best and the worst trajectory of
                        each group. Rafailov et al. 2023, "Direct preference optimization", equation 7
                        (arXiv:2305.18290)
    apo_zero_unpaired   1 - sigmoid(beta h) of a trajectory with an advantage above 0, sigmoid(beta h) of one below,
                        mean over trajectories. D'Oosterlinck et al. 2024, "Anchored preference optimization",
                        equation 7 (arXiv:2408.06266), as TRL's KTOTrainer has it without pairs

The gradient of both is that of a sum of w log p over the answers' tokens, with a w that follows from h at this moment:
so each optimiser step asks for h first, and then is a step of imitation with these weights. Exact, and nothing else of
the learner changes. The size of an advantage does not count here. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ratchet.trainer.rows.token_row import TokenRow


@dataclass(frozen=True, slots=True)
class PreferenceWeights:
    """The rows that count, with what their tokens weigh as advantages; and the mean loss at this moment."""

    rows: list[TokenRow]
    loss: float


def units(rows: Sequence[TokenRow], loss: str) -> list[list[TokenRow]]:
    """Return the rows that belong into one step together: those of a group for dpo, of a trajectory else."""
    found: dict[str, list[TokenRow]] = {}
    for row in rows:
        found.setdefault(row.group if loss == "dpo" else row.trajectory_id, []).append(row)
    return [members for members in found.values() if _COEFFICIENTS[loss](members, {}, 1.0) is not None]


def weigh(rows: Sequence[TokenRow], gaps: Sequence[float], loss: str, beta: float) -> PreferenceWeights:
    """Return the rows of one step with their weights; `gaps` are the rows' own log p - log p of the base model."""
    h: dict[str, float] = {}
    for row, gap in zip(rows, gaps, strict=True):
        h[row.trajectory_id] = h.get(row.trajectory_id, 0.0) + gap
    kept: list[tuple[TokenRow, float]] = []
    losses: list[float] = []
    for members in units(rows, loss):
        found = _COEFFICIENTS[loss](members, h, beta)
        if found is None:
            continue
        weights, value = found
        losses.append(value)
        kept += [(row, weights[row.trajectory_id]) for row in members if row.trajectory_id in weights]
    tokens = sum(row.tokens_trained for row, _ in kept)  # what the mean of imitation divides by
    scale = tokens / max(len(losses), 1)
    plain = [replace(r, advantage=w * scale, advantages=None, temperature=1.0, importance=False) for r, w in kept]
    return PreferenceWeights(plain, fmean(losses) if losses else 0.0)


_Found = tuple[dict[str, float], float] | None  # weight by trajectory, loss


def _paired(members: Sequence[TokenRow], h: Mapping[str, float], beta: float) -> _Found:
    ranked = sorted({row.trajectory_id: row.advantage for row in members}.items(), key=lambda one: one[1])
    (worst, least), (best, most) = ranked[0], ranked[-1]
    if not members[0].group or most <= least:
        return None
    z = beta * (h.get(best, 0.0) - h.get(worst, 0.0))
    weight = beta * _sigmoid(-z)
    return {best: weight, worst: -weight}, -math.log(max(_sigmoid(z), 1e-300))


def _unpaired(members: Sequence[TokenRow], h: Mapping[str, float], beta: float) -> _Found:
    name, advantage = members[0].trajectory_id, members[0].advantage
    if not advantage:
        return None
    likes = _sigmoid(beta * h.get(name, 0.0))
    slope = beta * likes * (1 - likes)
    return ({name: slope}, 1 - likes) if advantage > 0 else ({name: -slope}, likes)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


_COEFFICIENTS: Mapping[str, Callable[[Sequence[TokenRow], Mapping[str, float], float], _Found]] = {
    "dpo": _paired,
    "apo_zero_unpaired": _unpaired,
}
