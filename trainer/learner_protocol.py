"""The interface between controller and learner, and the report of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings


class LogprobScorer(Protocol):
    """Computes logprobs as the trainer does."""

    def score(self, rows: Sequence[Sequence[int]], *, adapter: bool | Path = True) -> list[tuple[float, ...]]:
        """Return the logprobs of each row under the newest version (True), the base model (False) or an adapter
        folder.
        """
        ...


class LearnerProtocol(Protocol):
    """The learner of a round; `ratchet.trainer.learner.learner.Learner` implements it."""

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
    """The figures of one round.

    loss, grad_norm             means over the round's optimizer steps; the norm is before clipping
    entropy                     of the policy at the trained tokens, mean in nats
    clip_ratio                  share of the trained tokens that the ratio's clip masked
    tokens_trained, rows, optimizer_steps  counts
    step                        optimizer steps since the first round
    logprob_abs_diff_mean/max   |trainer - vLLM| over the compared tokens, before the first step, nats
    tokens_compared             trained tokens of rows with `importance`; if 0, the two above are 0 and meaningless
    importance_clipped_ratio    share of the compared tokens whose importance weight reached its cap
    seconds                     wall time of the round
    weight_change               L2 norm of the change of the LoRA parameters
    kl                          to the base model at the trained tokens, mean in nats; 0 if `beta` is 0
    rows_rejected               rows that vLLM sampled with another policy than the one that is trained
    tokens_forwarded            tokens of the training pass, with padding, shared prefixes counted once
    learning_rate               of the steps
    approx_kl                   how far the steps moved the policy: mean k3 at trained tokens, nats per token
    approx_kl_target            target of `approx_kl`, also reported with a fixed learning rate
    approx_kl_tokens            trained tokens that `approx_kl` was measured on
    logprob_change_abs_mean     |log p after - log p before the steps|, mean over the same tokens
    logprob_change_positive_mean  the same with its sign, mean over those with a positive advantage
    dtype                       number format of the model's computation: bf16 or fp32
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
    dtype: str = "fp32"
