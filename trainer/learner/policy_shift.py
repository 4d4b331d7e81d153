"""How far a round's steps moved the policy at the round's own trained tokens.

g = log p_new - log p_old of a token, p_old the policy at the round's start. Rows that were rejected do not count. Does
not choose the tokens and does not decide anything: trainer/learner/learning_rate.py does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratchet.trainer.learner.micro_batches import Micro

_MOST_GAP = 20.0  # nats; a larger one is as far as anything can go, and its exponential no number


@dataclass(frozen=True, slots=True)
class Moved:
    """Means over the tokens that were looked at.

    k3        exp(g) - 1 - g, which estimates the KL
    absolute  |g|
    good      g of the tokens with a positive advantage, 0 where there were none
    """

    k3: float
    absolute: float
    good: float
    tokens: int


def sums(micro: Micro, now: torch.Tensor) -> torch.Tensor:
    """Sums of k3, |g| and the good tokens' g, and how many tokens and good tokens; (5,)."""
    on = micro["trained"] & micro["kept"]  # (N, T)
    gap = (now - micro["old_per_token_logps"])[on].double().clamp(max=_MOST_GAP)  # (K,)
    good = gap[micro["advantages"][on] > 0]
    numbers = ((gap.exp() - 1 - gap).sum(), gap.abs().sum(), good.sum())
    counts = torch.tensor([gap.numel(), good.numel()], dtype=torch.float64, device=gap.device)
    return torch.cat([torch.stack(numbers), counts])


def mean(total: torch.Tensor) -> Moved:
    """Return the means of such sums."""
    k3, absolute, good, tokens, n_good = total.tolist()
    return Moved(k3 / max(tokens, 1), absolute / max(tokens, 1), good / max(n_good, 1), round(tokens))
