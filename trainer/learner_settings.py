"""The learner's settings: what they mean, their defaults and their ranges.

Promises that settings that exist are sound; an error names the field and the remedy. Does not import torch, so that
the command line can parse them in no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import SettingError

LOSSES = ("dapo", "cispo", "grpo")

# The ranks that vLLM's LoRA kernels serve; any other is padded up to one of them by --max-lora-rank.
LARGEST_SERVABLE_RANK = 512


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How the LoRA adapter learns.

    rank, alpha, target_modules  of the LoRA adapter; alpha / rank scales its output
    learning_rate                of AdamW, constant over all rounds
    loss                         dapo: clipped ratio, mean over the round's tokens; cispo: clipped weight on the
                                 logprob, mean over tokens; grpo: clipped ratio, mean over rows of their token means
    epsilon_low, epsilon_high    the ratio to the round's first policy is clipped to [1 - low, 1 + high]; for cispo
                                 `epsilon_high` is the largest weight itself (5.0 is usual)
    kl                           weight of the KL penalty towards the base model, 0 = none
    max_grad_norm                the gradient is scaled down to this norm, 0 = never
    truncate_importance_at       cap of the weight trainer / engine probability of a token, None = no correction
    steps_per_round              optimiser steps that a round's rows are split into, shuffled by seed and step
    token_budget                 padded tokens per micro-batch: memory, never the result
    gradient_checkpointing       trade a third more time for much less activation memory
    seed                         of the adapter's first weights and of the shuffle
    threads                      CPU threads of torch, None = torch's own choice; 1 is by far the fastest for models of
                                 a few million parameters, and where the engine runs on the same cores
    """

    rank: int = 8
    alpha: int = 16
    target_modules: str | Sequence[str] = "all-linear"
    learning_rate: float = 1e-5
    loss: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    kl: float = 0.0
    max_grad_norm: float = 1.0
    truncate_importance_at: float | None = 2.0
    steps_per_round: int = 1
    token_budget: int = 8192
    gradient_checkpointing: bool = False
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        self._require("rank", 1 <= self.rank <= LARGEST_SERVABLE_RANK, f"an integer from 1 to {LARGEST_SERVABLE_RANK}")
        self._require("alpha", self.alpha >= 1, "at least 1")
        self._require("target_modules", bool(self.target_modules), '"all-linear" or the names of linear layers')
        self._require("learning_rate", 0 < self.learning_rate < math.inf, "above 0, such as 1e-5")
        self._require("loss", self.loss in LOSSES, f"one of {', '.join(LOSSES)}")
        self._require("epsilon_low", 0 < self.epsilon_low < 1, "between 0 and 1, such as 0.2")
        if self.loss == "cispo":
            self._require("epsilon_high", self.epsilon_high >= 1, "at least 1 for cispo, such as 5.0")
        else:
            self._require("epsilon_high", self.epsilon_high > 0, "above 0, such as 0.28")
        self._require("kl", 0 <= self.kl < math.inf, "0 or more")
        self._require(
            "kl",
            not (self.kl and self.loss == "grpo"),
            "0 with loss grpo, whose mean over rows cannot weigh the penalty; use loss dapo for a penalty",
        )
        self._require("max_grad_norm", self.max_grad_norm >= 0, "0 (no limit) or more")
        cap = self.truncate_importance_at
        self._require("truncate_importance_at", cap is None or 1 <= cap < math.inf, "None or at least 1, such as 2.0")
        self._require("steps_per_round", self.steps_per_round >= 1, "at least 1")
        self._require("token_budget", self.token_budget >= 1, "at least 1, such as 8192")
        self._require("threads", self.threads is None or self.threads >= 1, "None or at least 1")

    def _require(self, field: str, sound: bool, remedy: str) -> None:
        if not sound:
            raise SettingError(f"learner setting {field} is {getattr(self, field)!r}; it must be {remedy}")
