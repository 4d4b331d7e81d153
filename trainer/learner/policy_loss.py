"""The loss of one micro-batch. Pure.

With A the advantage of a token, w its weight in the step's mean, n the number of the step's units, log p its logprob
under the policy, p_0 under the policy at the start of the round and p_ref under the base model:

    r       p / p_0 of the token; or of its row, exp of the mean of log p - log p_0 over the row's n_row trained tokens
            (GSPO, arXiv:2507.18071, equation 7); 1 without a ratio
    clip    -min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv:1707.06347, equation 7; DAPO, arXiv:2503.14476,
            equation 8
    weight  -sg(min(r, high)) A log p: CISPO, arXiv:2506.13585, equation 4. Without a ratio: -A log p (SFT)
    KL      beta r (p_ref / p - 1 - log(p_ref / p)): k3 of Schulman 2020, "Approximating KL divergence", with the ratio
            that makes its gradient that of the reverse KL (DeepSeek-V3.2, arXiv:2512.02556, equation 7)
    H       the entropy of the token's distribution, as a bonus

    loss = sum over tokens of w / n (clip or weight + KL - entropy_coef H)

Left out of the papers: the KL as a part of the reward, and clipping against vLLM's logprobs. The mismatch with vLLM
enters by the importance weight in A alone (trainer/learner/importance_sampling.py); both would correct twice.
tests/trainer/test_loss_contract.py compares it with the formulas in float64 and with TRL's losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ratchet.trainer.learner.forward_pass import Micro
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.statistics import MIN_SCORE_SPREAD


def ratio(micro: Micro, logprobs: torch.Tensor, level: str) -> torch.Tensor:
    """Return r, (N, T) by token or (N, 1) by row; `logprobs` (N, T) are the policy's."""
    log_ratio = (logprobs - micro["old_per_token_logps"]) * micro["trained"]  # (N, T)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / micro["trained"].sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    return log_ratio.exp()


def policy_loss(micro: Micro, logprobs: torch.Tensor, entropy: torch.Tensor, settings: LearnerSettings) -> torch.Tensor:
    """Return the sum over tokens of w times their loss, (); `logprobs` and `entropy` (N, T) are the policy's."""
    objective, (low, high), advantages = settings.objective, settings.clip, micro["advantages"]
    r = ratio(micro, logprobs, objective.ratio)
    if objective.shape == "weight":
        loss = -r.clamp(max=high).detach() * advantages * logprobs  # (N, T)
    else:
        loss = -torch.min(r * advantages, r.clamp(1 - low, 1 + high) * advantages)  # (N, T)
    if settings.beta:
        gap = micro["ref_per_token_logps"] - logprobs  # (N, T)
        loss = loss + settings.beta * r * (gap.exp() - gap - 1)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    return (loss * micro["weights"]).sum()


def clipped(micro: Micro, logprobs: torch.Tensor, settings: LearnerSettings) -> torch.Tensor:
    """Return which tokens' ratios lost their gradient, or for `weight` a part of their weight, to the clip; (N, T)."""
    r, advantages, (low, high) = ratio(micro, logprobs, settings.objective.ratio), micro["advantages"], settings.clip
    if settings.objective.shape == "weight":
        return (r > high) & (advantages > 0)
    return ((r < 1 - low) & (advantages < 0)) | ((r > 1 + high) & (advantages > 0))


# Whitening: advantages with mean 0 and variance 1 over all trained tokens of a round, for REINFORCE++. Pure.
#
# If all advantages are equal, they become 0, and the learner refuses the round: rounding noise is never scaled up.


def whiten(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows with whitened advantages: every trained token counts once."""
    weighted = [pair for row in rows for pair in _advantages(row)]
    tokens = sum(count for _, count in weighted) or 1
    mean = sum(value * count for value, count in weighted) / tokens
    std = math.sqrt(sum((value - mean) ** 2 * count for value, count in weighted) / tokens)
    scale = 1.0 / std if std > MIN_SCORE_SPREAD else 0.0
    return [_shifted(row, mean, scale) for row in rows]


def _advantages(row: TokenRow) -> list[tuple[float, int]]:
    """Return pairs of an advantage and the number of trained tokens that have it."""
    if row.advantages is None:
        return [(row.advantage, row.tokens_trained)]
    return [(value, 1) for value, trained in zip(row.advantages, row.mask, strict=True) if trained]


def _shifted(row: TokenRow, mean: float, scale: float) -> TokenRow:
    each = tuple((value - mean) * scale for value in row.advantages) if row.advantages is not None else None
    return replace(row, advantage=(row.advantage - mean) * scale, advantages=each)
