"""The learner's settings: meaning, defaults and ranges. Imports no torch, so the command line can parse them quickly.

An instance is always valid; the error of an invalid one names the field and the remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ratchet.trainer.settings.adapter_and_memory import AUTO, AdapterAndMemorySettings
from ratchet.trainer.settings.objectives import MEANS, Objective, find_objective

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class LearnerSettings(AdapterAndMemorySettings):
    """How the LoRA adapter of an agent is trained. Raises SettingError for values out of range.

    lora_alpha                scale of the LoRA adapter: its output is multiplied by lora_alpha / lora_r
    learning_rate             learning rate of AdamW; auto: adjusted after each round towards `target_kl`
    target_kl                 with learning_rate auto: the target for the mean k3 by which a round moves the policy at
                              its trained tokens, nats per token; null: 0.3 nats per trajectory, limited to 0.001 to
                              0.01 per token
    lr_scheduler_type         schedule of a learning_rate that is a number, over max_steps: constant, linear or cosine;
                              the latter two fall to a tenth of it, and stay there
    warmup_steps              optimizer steps over which the learning rate rises to its full value
    max_steps                 optimizer steps over which linear and cosine fall; null: with constant
    weight_decay              AdamW's weight decay, which pulls the adapter towards the base model; 0: none
    loss_type                 loss: dapo, cispo, dr_grpo, grpo, gspo, reinforce++, distillation, sft, or a plug-in's,
                              such as dpo and apo_zero_unpaired (docs/training.md)
    epsilon                   lower clip: the ratio to the round's first policy is clipped to at least 1 - epsilon;
                              null: the usual value of the loss
    epsilon_high              upper clip: the ratio is clipped to at most 1 + epsilon_high; for cispo, the largest
                              weight; null: the usual value of the loss
    mean_over                 what the loss is averaged over: tokens (each counts once), rows or trajectories (each
                              counts once, whatever its tokens); null: the usual choice of the loss
    dr_grpo_length            constant number of tokens by which dr_grpo divides the sum of each row
    beta                      weight of the KL penalty towards the base model; 0: none
    entropy_coef              weight of the entropy bonus at the trained tokens; 0: none
    top_entropy_quantile      share of a step's tokens, those of highest entropy, that carry the policy gradient
    preference_beta           beta of a preference loss; a smaller value allows more distance from the base model
    max_grad_norm             maximum gradient norm; larger gradients are clipped; 0: no limit
    vllm_importance_sampling_clip_max  maximum weight of a token, its probability under the trainer divided by that
                              under vLLM; null: no correction
    sequence_mask_threshold   a row is masked if trainer / vLLM probability, as the geometric mean over its tokens, is
                              above this or below 1 / this, or if their KL (k3) is above its logarithm; null: never.
                              This limit applies to rows that are 7 versions old; for k versions its logarithm is
                              multiplied by (1 + k) / 8, which gives 1.09 for a fresh row, and below 64 tokens by
                              sqrt(64 / tokens)
    steps_per_round           optimizer steps per round; the rows are shuffled by seed and divided among them
    max_length                maximum tokens of a trained row; longer rows are skipped, and a trajectory without other
                              rows is dropped; null: what fits into memory, found by trial
    init_adapter              folder of a PEFT adapter, or a version's reference in `adapters.store`, from which a new
                              agent starts; it is published as its version 1; null: new LoRA weights
    seed                      random seed of the adapter's initial weights and of the shuffle
    """

    lora_alpha: int = 16
    learning_rate: float | Literal["auto"] = AUTO
    target_kl: float | None = None
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_steps: int | None = None
    weight_decay: float = 0.0
    loss_type: str = "dapo"
    epsilon: float | None = None
    epsilon_high: float | None = None
    mean_over: Literal["tokens", "rows", "trajectories"] | None = None
    dr_grpo_length: int = 1024
    beta: float = 0.0
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    preference_beta: float = 0.1
    max_grad_norm: float = 1.0
    vllm_importance_sampling_clip_max: float | None = 2.0
    sequence_mask_threshold: float | None = 2.0
    steps_per_round: int = 1
    max_length: int | None = None
    init_adapter: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_shared()
        if self.init_adapter and "://" not in self.init_adapter:  # the learner may run in another folder
            object.__setattr__(self, "init_adapter", str(Path(self.init_adapter).expanduser().absolute()))
        self._require("init_adapter", self.init_adapter != "", "null, a folder or a reference")
        self._require("lora_alpha", self.lora_alpha >= 1, "at least 1")
        rate, target_kl = self.learning_rate, self.target_kl
        valid = rate == AUTO if isinstance(rate, str) else 0 < rate < math.inf
        self._require("learning_rate", valid, "auto, or a number above 0, such as 1e-5")
        self._require(
            "target_kl", target_kl is None or 0 < target_kl < 1, "null, or above 0 and below 1, such as 0.005"
        )
        self._require_schedule()
        find_objective(self.loss_type)
        low, high = self.clip
        self._require("epsilon", 0 < low < 1, "between 0 and 1, such as 0.2, or null")
        if self.objective.shape == "weight":
            self._require("epsilon_high", high >= 1, f"at least 1 for {self.loss_type}, such as 5.0, or null")
        else:
            self._require("epsilon_high", 0 < high < math.inf, "above 0, such as 0.28, or null")
        fits = self.mean_over is None or (self.mean_over in MEANS and not self.objective.preference)
        self._require("mean_over", fits, f"one of {', '.join(MEANS)}, or null, as it must be with a preference loss")
        self._require("dr_grpo_length", self.dr_grpo_length >= 1, "at least 1, such as 1024")
        self._require("beta", 0 <= self.beta < math.inf, "0 or more")
        self._require("entropy_coef", 0 <= self.entropy_coef < math.inf, "0 or more, such as 0.001")
        self._require("top_entropy_quantile", 0 < self.top_entropy_quantile <= 1, "above 0 and at most 1, such as 0.2")
        self._require("preference_beta", 0 < self.preference_beta < math.inf, "above 0, such as 0.1")
        self._require("max_grad_norm", 0 <= self.max_grad_norm < math.inf, "a finite number, 0 (no limit) or more")
        cap = self.vllm_importance_sampling_clip_max
        self._require(
            "vllm_importance_sampling_clip_max", cap is None or 1 <= cap < math.inf, "None or at least 1, such as 2.0"
        )
        limit = self.sequence_mask_threshold
        self._require("sequence_mask_threshold", limit is None or 1 < limit < math.inf, "None or above 1, such as 2.0")
        self._require("steps_per_round", self.steps_per_round >= 1, "at least 1")
        self._require("max_length", self.max_length is None or self.max_length >= 2, "None or at least 2 tokens")

    def _require_schedule(self) -> None:
        schedule, steps = self.lr_scheduler_type, self.max_steps
        self._require("lr_scheduler_type", schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("warmup_steps", self.warmup_steps >= 0, "0 or more")
        self._require("weight_decay", 0 <= self.weight_decay < 1, "0 or more and below 1, such as 0.01")
        if schedule == "constant":
            self._require("max_steps", steps is None, "null with lr_scheduler_type constant, which never falls")
        else:
            least = self.warmup_steps + 1
            needed = f"at least {least} with lr_scheduler_type {schedule} and warmup_steps {self.warmup_steps}"
            self._require("max_steps", steps is not None and steps >= least, needed)
        if self.learning_rate == AUTO:
            reason = "unless learning_rate is a number: auto sets the rate after each round by itself"
            self._require("lr_scheduler_type", schedule == "constant", f"constant, {reason}")
            self._require("warmup_steps", self.warmup_steps == 0, f"0, {reason}")

    @property
    def objective(self) -> Objective:
        """The parts of the loss."""
        found = find_objective(self.loss_type)
        return found if self.mean_over is None else replace(found, mean=self.mean_over)

    @property
    def clip(self) -> tuple[float, float]:
        """Return epsilon and epsilon_high, with the loss's usual values for None."""
        low, high = self.epsilon, self.epsilon_high
        return (
            self.objective.epsilon_low if low is None else low,
            self.objective.epsilon_high if high is None else high,
        )
