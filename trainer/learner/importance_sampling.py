"""Off-policy correction of the difference between vLLM's and the trainer's probabilities.

Two corrections, both with the policy at the start of the round:

- Truncated importance sampling of tokens: min(pi_trainer / pi_engine, C) multiplies the policy term of a token. Yao et
  al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
- Rejection of rows: a row is dropped if the geometric mean of pi_trainer / pi_engine over its trained tokens is
  outside [1 / L, L], because another policy sampled it. Its tokens do not count in the denominator either. Liu et al.
  2025, "When speed kills stability" (the geometric level: a product over thousands of tokens would reject every long
  row). The limit widens with the age of a row in versions, as the policy moves: log L (1 + age) / 8, and log L from an
  age of 7 on.

Rows without `importance` (sampled with top_p, top_k, min_p or penalties) are neither weighted nor rejected: their
logprobs belong to another distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratchet.trainer.learner.micro_batches import Micro
from ratchet.trainer.settings.objectives import Objective, StepTokens

MAX_DISTILLATION_ADVANTAGE = 10.0  # nats
_FULL_LIMIT_AGE = 8  # versions, including the sampling one, from which the whole limit applies


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
    """Return which rows are trained, (N, 1): not those whose mean ratio is too far from 1 for their age."""
    n_row = micro["trained"].sum(-1, keepdim=True)  # (N, 1)
    if limit is None:
        return n_row > 0
    share = ((1.0 + micro["age"]) / _FULL_LIMIT_AGE).clamp(max=1.0)  # (N, 1)
    mean = log_ratio(micro).sum(-1, keepdim=True) / n_row.clamp(min=1)  # (N, 1)
    near = mean.abs() <= share * math.log(limit)  # False for nan
    return (n_row > 0) & (near | ~micro["importance"])


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
