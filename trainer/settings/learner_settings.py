"""The learner's settings: meaning, defaults and ranges. Imports no torch, so the command line can parse them quickly.

An instance is always valid; the error of an invalid one names the field and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.trainer.errors import SettingError
from ratchet.trainer.settings.objectives import OBJECTIVES, Objective

AUTO: Literal["auto"] = "auto"

# Quantizations of the frozen base model.
QUANTIZATIONS = ("none", "nf4")

# The largest rank that vLLM's LoRA kernels serve. --max-lora-rank pads other ranks up to one of its ranks.
MAX_SERVABLE_RANK = 512


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How the LoRA adapter is trained. Raises SettingError for values out of range.

    lora_r                    rank of the LoRA adapter
    lora_alpha                scale of the LoRA adapter: its output is multiplied by lora_alpha / lora_r
    target_modules            layers that get an adapter: all-linear, or a list of names
    learning_rate             learning rate of AdamW; auto: adjusted after each round towards `target_kl`
    target_kl                 with learning_rate auto: the target for the mean k3 by which a round moves the policy at
                              its trained tokens, nats per token; null: 0.3 nats per trajectory, limited to 0.001 to
                              0.01 per token
    loss_type                 loss: dapo, cispo, dr_grpo, grpo, gspo, reinforce++, sft, dpo or apo_zero_unpaired
                              (docs/training.md)
    epsilon                   lower clip: the ratio to the round's first policy is clipped to at least 1 - epsilon;
                              null: the usual value of the loss
    epsilon_high              upper clip: the ratio is clipped to at most 1 + epsilon_high; for cispo, the largest
                              weight; null: the usual value of the loss
    dr_grpo_length            constant number of tokens by which dr_grpo divides the sum of each row
    beta                      weight of the KL penalty towards the base model; 0: none
    entropy_coef              weight of the entropy bonus at the trained tokens; 0: none
    top_entropy_quantile      share of a step's tokens, those of highest entropy, that carry the policy gradient
    preference_beta           beta of dpo and apo_zero_unpaired; a smaller value allows more distance from the base
                              model
    max_grad_norm             maximum gradient norm; larger gradients are clipped; 0: no limit
    vllm_importance_sampling_clip_max  maximum weight of a token, its probability under the trainer divided by that
                              under vLLM; null: no correction
    sequence_mask_threshold   a row is masked if trainer / vLLM probability, as the geometric mean over its tokens, is
                              above this or below 1 / this; null: never. This limit applies to rows that are 7 versions
                              old; for k versions it is raised to the power (1 + k) / 8, which gives 1.09 for a fresh
                              row
    steps_per_round           optimizer steps per round; the rows are shuffled by seed and divided among them
    token_budget              padded tokens per micro-batch; affects memory, never the result
    max_length                maximum tokens of a trained row; longer rows are skipped, and a trajectory without other
                              rows is dropped; null: what fits into memory, found by trial
    share_prefixes            compute a prefix that rows share once, if that is faster and the model's attention allows
                              it; never affects the result
    quantization              quantization of the frozen base model: none, or nf4 (QLoRA; needs the extra `qlora`)
    gradient_checkpointing    use less activation memory for a third more time
    seed                      random seed of the adapter's initial weights and of the shuffle
    threads                   CPU threads of torch; null: torch's default; 1 is by far the fastest for models of a few
                              million parameters, and if vLLM runs on the same cores
    """

    lora_r: int = 8
    lora_alpha: int = 16
    target_modules: str | Sequence[str] = "all-linear"
    learning_rate: float | Literal["auto"] = AUTO
    target_kl: float | None = None
    loss_type: str = "dapo"
    epsilon: float | None = None
    epsilon_high: float | None = None
    dr_grpo_length: int = 1024
    beta: float = 0.0
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    preference_beta: float = 0.1
    max_grad_norm: float = 1.0
    vllm_importance_sampling_clip_max: float | None = 2.0
    sequence_mask_threshold: float | None = 2.0
    steps_per_round: int = 1
    token_budget: int = 8192
    max_length: int | None = None
    share_prefixes: bool = True
    quantization: str = "none"
    gradient_checkpointing: bool = False
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        self._require("lora_r", 1 <= self.lora_r <= MAX_SERVABLE_RANK, f"an integer from 1 to {MAX_SERVABLE_RANK}")
        self._require("lora_alpha", self.lora_alpha >= 1, "at least 1")
        self._require("target_modules", bool(self.target_modules), '"all-linear" or the names of linear layers')
        rate, target_kl = self.learning_rate, self.target_kl
        valid = rate == AUTO if isinstance(rate, str) else 0 < rate < math.inf
        self._require("learning_rate", valid, "auto, or a number above 0, such as 1e-5")
        self._require(
            "target_kl", target_kl is None or 0 < target_kl < 1, "null, or above 0 and below 1, such as 0.005"
        )
        self._require("loss_type", self.loss_type in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}")
        low, high = self.clip
        self._require("epsilon", 0 < low < 1, "between 0 and 1, such as 0.2, or null")
        if self.objective.shape == "weight":
            self._require("epsilon_high", high >= 1, f"at least 1 for {self.loss_type}, such as 5.0, or null")
        else:
            self._require("epsilon_high", 0 < high < math.inf, "above 0, such as 0.28, or null")
        self._require("dr_grpo_length", self.dr_grpo_length >= 1, "at least 1, such as 1024")
        self._require("beta", 0 <= self.beta < math.inf, "0 or more")
        self._require("entropy_coef", 0 <= self.entropy_coef < math.inf, "0 or more, such as 0.001")
        self._require("top_entropy_quantile", 0 < self.top_entropy_quantile <= 1, "above 0 and at most 1, such as 0.2")
        self._require("preference_beta", 0 < self.preference_beta < math.inf, "above 0, such as 0.1")
        self._require("max_grad_norm", self.max_grad_norm >= 0, "0 (no limit) or more")
        cap = self.vllm_importance_sampling_clip_max
        self._require(
            "vllm_importance_sampling_clip_max", cap is None or 1 <= cap < math.inf, "None or at least 1, such as 2.0"
        )
        limit = self.sequence_mask_threshold
        self._require("sequence_mask_threshold", limit is None or 1 < limit < math.inf, "None or above 1, such as 2.0")
        self._require("quantization", self.quantization in QUANTIZATIONS, f"one of {', '.join(QUANTIZATIONS)}")
        self._require("steps_per_round", self.steps_per_round >= 1, "at least 1")
        self._require("token_budget", self.token_budget >= 1, "at least 1, such as 8192")
        self._require("max_length", self.max_length is None or self.max_length >= 2, "None or at least 2 tokens")
        self._require("threads", self.threads is None or self.threads >= 1, "None or at least 1")

    @property
    def objective(self) -> Objective:
        """The parts of the loss."""
        return OBJECTIVES[self.loss_type]

    @property
    def clip(self) -> tuple[float, float]:
        """Return epsilon and epsilon_high, with the loss's usual values for None."""
        low, high = self.epsilon, self.epsilon_high
        return (
            self.objective.epsilon_low if low is None else low,
            self.objective.epsilon_high if high is None else high,
        )

    def _require(self, field: str, valid: bool, remedy: str) -> None:
        if not valid:
            raise SettingError(f"learner setting {field} is {getattr(self, field)!r}; it must be {remedy}")
