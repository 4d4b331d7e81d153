"""Off-policy correction: what the engine sampled with, against what the trainer computes.

Two corrections, both against the policy at the round's start and never against the one that is being trained:

- Truncated importance sampling of tokens: min(pi_trainer / pi_engine, C) multiplies the policy term of a token. Yao et
  al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
- Rejection of rows: a row whose geometric mean of pi_trainer / pi_engine over its trained tokens lies outside
  [1 / L, L] was sampled by another policy than the one that learns, and is left out. Its tokens leave the denominator,
  so that the others count as if it had never been there. Liu et al. 2025, "When speed kills stability" (the geometric
  level: a product over thousands of tokens would reject every long row). L grows with a row's age in versions, since
  the policy has moved on by then: log L (1 + age) / 8, and log L from an age of 7 on.

Rows without `importance` (sampled with top_p, top_k, min_p or penalties) are neither weighted nor rejected: their
logprobs belong to another distribution. Does not know which loss follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratchet.trainer.learner.micro_batches import Micro

_OLD = 8  # versions: a row that is this old, the one that it was sampled from included, may be off by the whole limit


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the trainer's logprobs lie from the engine's, summed over the comparable trained tokens."""

    total: float
    largest: float
    tokens: int
    truncated: int


def log_ratio(micro: Micro) -> torch.Tensor:
    """log(pi_trainer / pi_engine) of every trained token, (N, T); 0 at all others."""
    gap = micro["old_per_token_logps"] - micro["sampling_per_token_logps"]  # (N, T)
    return gap.masked_fill(~micro["trained"], 0.0)


def importance_weight(micro: Micro, cap: float | None) -> torch.Tensor:
    """min(pi_trainer / pi_engine, cap) of every token, (N, T); 1 where no correction is possible or wanted."""
    if cap is None:
        return torch.ones_like(micro["sampling_per_token_logps"])
    return torch.where(micro["importance"], log_ratio(micro).exp().clamp(max=cap), 1.0)


def kept(micro: Micro, limit: float | None) -> torch.Tensor:
    """Which rows are trained, (N, 1): False where the geometric mean of the ratio is too far from 1 for their age."""
    n_row = micro["trained"].sum(-1, keepdim=True)  # (N, 1)
    if limit is None:
        return n_row > 0
    share = ((1.0 + micro["age"]) / _OLD).clamp(max=1.0)  # (N, 1)
    mean = log_ratio(micro).sum(-1, keepdim=True) / n_row.clamp(min=1)  # (N, 1)
    near = mean.abs() <= share * math.log(limit)  # a mean that is not a number is not near
    return (n_row > 0) & (near | ~micro["importance"])


def mismatch(micros: Sequence[Micro], cap: float | None) -> Mismatch:
    """Compare trainer and engine over micro-batches. Rows without `importance` are not comparable."""
    total, largest, truncated, tokens = 0.0, 0.0, 0, 0
    for micro in micros:
        gap = log_ratio(micro)[micro["trained"] & micro["importance"]]  # (K,)
        if not gap.numel():
            continue
        total += float(gap.abs().sum())
        largest = max(largest, float(gap.abs().max()))
        tokens += gap.numel()
        truncated += 0 if cap is None else int((gap.exp() > cap).sum())
    return Mismatch(total, largest, tokens, truncated)
