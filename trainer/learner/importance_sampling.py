"""Off-policy correction of the difference between vLLM's and the trainer's probabilities.

Two corrections, both with the policy at the start of the round:

- Truncated importance sampling of tokens: min(pi_trainer / pi_engine, C) multiplies the policy term of a token. Yao et
  al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
- Rejection of rows: a row is dropped if another policy sampled it, by log r = log(pi_trainer / pi_engine) of its n
  trained tokens: if |mean of log r| (the geometric level; Liu et al. 2025, "When speed kills stability") or the mean of
  r - 1 - log r (k3, in which differences of both signs do not cancel; Schulman 2020, "Approximating KL divergence") is
  above the limit. Its tokens do not count in the denominator either. The limit widens with the age of a row in
  versions, as the policy moves: log L (1 + age) / 8, and log L from an age of 7 on. Below 64 tokens it grows with
  sqrt(64 / n), as the standard error of a mean does: so one noisy or much-learnt token of a short answer rejects
  nothing. tests/trainer/test_rejection.py has the error rates.

Rows without `importance` (sampled with penalties or a bias) are neither weighted nor rejected: their logprobs belong to
another distribution. With top_p, top_k or min_p, both policies are normalised over the tokens that these leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratchet.trainer.learner.forward_pass import Micro
from ratchet.trainer.settings.objectives import Objective, StepTokens

MAX_DISTILLATION_ADVANTAGE = 10.0  # nats
_FULL_LIMIT_AGE = 8  # versions, including the sampling one, from which the whole limit applies
_FULL_LIMIT_TOKENS = 64  # trained tokens of a row; fewer widen its limit


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The differences between the trainer's and vLLM's logprobs, over the comparable trained tokens.

    fresh_*    over those of them that the version sampled from which the round starts
    """

    total: float
    largest: float
    tokens: int
    truncated: int
    fresh_total: float
    fresh_tokens: int


def log_ratio(micro: Micro) -> torch.Tensor:
    """Return log(pi_trainer / pi_engine) of the trained tokens, (N, T); 0 elsewhere."""
    gap = micro["old_per_token_logps"] - micro["sampling_per_token_logps"]  # (N, T)
    return gap.masked_fill(~micro["trained"], 0.0)


def importance_weight(micro: Micro, cap: float | None) -> torch.Tensor:
    """Return min(pi_trainer / pi_engine, cap) of each token, (N, T); 1 if there is no correction."""
    if cap is None:
        return torch.ones_like(micro["sampling_per_token_logps"])
    return torch.where(micro["importance"], log_ratio(micro).exp().clamp(max=cap), 1.0)


def kept(micro: Micro, limit: float | None) -> torch.Tensor:
    """Return which rows are trained, (N, 1): not those too far from the policy for their age and number of tokens."""
    n_row = micro["trained"].sum(-1, keepdim=True)  # (N, 1)
    if limit is None:
        return n_row > 0
    share = ((1.0 + micro["age"]) / _FULL_LIMIT_AGE).clamp(max=1.0)  # (N, 1)
    n_row = n_row.clamp(min=1)
    largest = share * math.log(limit) * (_FULL_LIMIT_TOKENS / n_row).clamp(min=1.0).sqrt()  # (N, 1)
    log_r = log_ratio(micro)  # (N, T)
    level = log_r.sum(-1, keepdim=True).abs() / n_row  # (N, 1)
    k3 = (log_r.exp() - 1.0 - log_r).sum(-1, keepdim=True) / n_row  # (N, 1)
    near = (level <= largest) & (k3 <= largest)  # False for nan
    return micro["trained"].any(-1, keepdim=True) & (near | ~micro["importance"])


def mismatch(micros: Sequence[Micro], cap: float | None) -> Mismatch:
    """Compare the trainer with vLLM over micro-batches, without rows that lack `importance`."""
    total, largest, truncated, tokens, fresh_total, fresh_tokens = 0.0, 0.0, 0, 0, 0.0, 0
    for micro in micros:
        compared = micro["trained"] & micro["importance"]  # (N, T)
        ratio = log_ratio(micro)  # (N, T)
        gap = ratio[compared]  # (K,)
        if not gap.numel():
            continue
        fresh = ratio[compared & (micro["age"] == 0)]
        fresh_total += float(fresh.abs().sum())
        fresh_tokens += fresh.numel()
        total += float(gap.abs().sum())
        largest = max(largest, float(gap.abs().max()))
        tokens += gap.numel()
        truncated += 0 if cap is None else int((gap.exp() > cap).sum())
    return Mismatch(total, largest, tokens, truncated, fresh_total, fresh_tokens)


def advantages_at_start(micro: Micro, objective: Objective) -> torch.Tensor:
    """Return the advantages (N, T) for the policy at the start of the round, whose logprobs the micro-batch has.

    Distillation: log p_teacher - log p. The rows hold log p_teacher - log p_engine, of the policy that sampled them.
    """
    advantages = micro["advantages"]
    if not objective.distillation:
        return advantages
    gap = advantages - log_ratio(micro)  # (N, T)
    return gap.clamp(-MAX_DISTILLATION_ADVANTAGE, MAX_DISTILLATION_ADVANTAGE)


def token_advantages(micro: Micro, objective: Objective, weight: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Return the weighted advantages (N, T) as the objective changes them.

    The micro-batch has the old policy's logprobs; `weight` is the importance weight of each token, (N, T).
    """
    advantages = advantages_at_start(micro, objective) * weight  # (N, T)
    if objective.token_advantages is None:
        return advantages
    trained, sampled = micro["trained"], micro["sampling_per_token_logps"]  # (N, T) each
    tokens = StepTokens(advantages * trained, micro["old_per_token_logps"], entropy, sampled, trained)
    changed: torch.Tensor = objective.token_advantages(tokens)
    return changed
