"""The policy shift: how far the steps of a round moved the policy at trained tokens of the round.

g = log p_new - log p_old of a token, with p_old the policy at the start of the round. Rejected rows do not count.
trainer/learner/learning_rate.py adapts the learning rate to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratchet.trainer.learner.micro_batches import Micro

_MAX_GAP = 20.0  # nats; exp of much larger gaps overflows


@dataclass(frozen=True, slots=True)
class PolicyShift:
    """Means over the sampled tokens.

    k3        exp(g) - 1 - g, which estimates the KL
    absolute  |g|
    positive  g of the tokens with a positive advantage, 0 if there are none
    """

    k3: float
    absolute: float
    positive: float
    tokens: int


def sums(micro: Micro, now: torch.Tensor) -> torch.Tensor:
    """Return the sums of k3, |g| and g of tokens with a positive advantage, and both token counts; (5,)."""
    counted = micro["trained"] & micro["kept"]  # (N, T)
    gap = (now - micro["old_per_token_logps"])[counted].double().clamp(max=_MAX_GAP)  # (K,)
    positive = gap[micro["advantages"][counted] > 0]
    totals = ((gap.exp() - 1 - gap).sum(), gap.abs().sum(), positive.sum())
    counts = torch.tensor([gap.numel(), positive.numel()], dtype=torch.float64, device=gap.device)
    return torch.cat([torch.stack(totals), counts])


def mean(total: torch.Tensor) -> PolicyShift:
    """Return the means from the `sums`."""
    k3, absolute, positive, tokens, n_positive = total.tolist()
    return PolicyShift(k3 / max(tokens, 1), absolute / max(tokens, 1), positive / max(n_positive, 1), round(tokens))
