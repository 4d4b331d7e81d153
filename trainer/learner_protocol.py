"""What the controller asks of a learner, and the report of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings


class LearnerProtocol(Protocol):
    """What a round needs of a learner; `trainer.learner.Learner` is one."""

    @property
    def step(self) -> int: ...

    def unfit(self, row: TokenRow) -> str | None: ...

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport: ...

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path | None, settings: LearnerSettings) -> None: ...


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did.

    loss, grad_norm            means over the round's optimiser steps; the norm is before clipping
    entropy                    of the policy at the trained tokens, mean in nats
    clip_ratio                 of the trained tokens, those that the ratio's clip silenced
    tokens_trained, rows, optimizer_steps  counts
    step                       optimiser steps since the first round
    logprob_abs_diff_mean/max  |trainer - engine| over the compared tokens, before the first step
    tokens_compared            trained tokens of rows with `importance`; 0 makes the two above 0 without meaning
    importance_clipped_ratio of the compared tokens, those whose importance weight met its cap
    seconds                    wall time of the round
    weight_change              L2 norm of what was added to the LoRA parameters
    kl                         to the base model at the trained tokens, mean in nats; 0 where `kl` is not set
    rows_rejected              rows that the engine sampled with another policy than the one that learns
    tokens_forwarded           that the training pass went through, padding included, shared prefixes once
    learning_rate              that the steps were taken with
    approx_kl                  how far the steps moved the policy: mean k3 at trained tokens, nats a token
    approx_kl_target           what `approx_kl` is steered to, or would be where the rate is fixed
    approx_kl_tokens           trained tokens that were looked at for it
    logprob_change_abs_mean               |log p after - log p before the steps|, mean over the same tokens
    logprob_change_positive_mean              the same with its sign, mean over those with a positive advantage
    numbers                    that the model computes in: bf16 or fp32
    """

    loss: float
    grad_norm: float
    entropy: float
    clip_ratio: float
    tokens_trained: int
    rows: int
    optimizer_steps: int
    step: int
    logprob_abs_diff_mean: float
    logprob_abs_diff_max: float
    tokens_compared: int
    importance_clipped_ratio: float
    seconds: float
    weight_change: float
    kl: float = 0.0
    rows_rejected: int = 0
    tokens_forwarded: int = 0
    learning_rate: float = 0.0
    approx_kl: float = 0.0
    approx_kl_target: float = 0.0
    approx_kl_tokens: int = 0
    logprob_change_abs_mean: float = 0.0
    logprob_change_positive_mean: float = 0.0
    numbers: str = "fp32"
