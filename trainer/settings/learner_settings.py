"""The learner's settings: how an agent's adapter is trained, and what all agents of the learner share.

Imports no torch. An instance is always valid; the error of an invalid one names the field and the remedy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from ratchet.store.access.replicas import plain_url
from ratchet.trainer.errors import SettingError
from ratchet.trainer.settings.objectives import MEANS, Objective, find_objective


class Section(BaseModel):
    """A section of the settings: frozen; unknown names are errors, and no error shows a value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


VARIABLE = "CUDA_VISIBLE_DEVICES"

_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/.-]+")


def _as_text(value: Any) -> Any:
    """Return `0`, `[0, 1]` or `"0,1"` in the format of CUDA_VISIBLE_DEVICES."""
    if value is None:
        return None
    parts = value if isinstance(value, list | tuple) else str(value).split(",") if str(value).strip() else []
    names = [str(part).strip() for part in parts]
    for name in names:
        if not _DEVICE.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a device: give numbers, or UUIDs as nvidia-smi -L prints them, such as 0,1"
            )
    return ",".join(names)


PlainUrl = Annotated[str, AfterValidator(plain_url)]  # http(s), stored without a trailing /v1
# GPUs in the format of CUDA_VISIBLE_DEVICES, which they override; without either every GPU is visible, "" hides all.
Devices = Annotated[str | None, BeforeValidator(_as_text)]


def pinned(devices: str | None) -> dict[str, str]:
    """Return the environment variable for these devices; empty if the environment's own applies."""
    return {} if devices is None else {VARIABLE: devices}


AUTO: Literal["auto"] = "auto"

# Number formats of the learner's computation, in vLLM's words.
DTYPES = (AUTO, "bfloat16", "float32")

# Quantizations of the frozen base model.
QUANTIZATIONS = ("none", "nf4")

# Implementations of attention, by their names in transformers.
ATTENTIONS = (AUTO, "sdpa", "eager", "flash_attention_2", "flash_attention_3")

# The values of vLLM's --max-lora-rank; its LoRA kernels pad other ranks up to one of them.
SERVABLE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_SERVABLE_RANK = SERVABLE_RANKS[-1]

# Variants of LoRA in adapter_config.json that compute something else from the same matrices.
LORA_VARIANTS = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "alpha_pattern",
    "rank_pattern",
    "modules_to_save",
    "lora_bias",
)


@dataclass(frozen=True, slots=True)
class AdapterAndMemorySettings:
    """The shape of the adapters, and how rows are computed. Raises SettingError for values out of range.

    lora_r                    rank of the LoRA adapters
    target_modules            layers that get an adapter: all-linear, or a list of names; all-linear includes the
                              experts of a mixture of experts, and leaves out its router and a vision tower
    exclude_modules           layers that get no adapter: names, or endings of names, as for target_modules
    token_budget              padded tokens per micro-batch; affects memory, never the result
    dtype                     number format of the base model and of the computation: bfloat16, float32, or auto: as
                              `vllm.dtype`, so that the learner sees what is served; where that is auto too, bfloat16 on
                              a GPU and float32 on a CPU; adapters stay in float32
    share_prefixes            compute a prefix that rows share once, if that is faster and the model's attention allows
                              it; never affects the result
    quantization              quantization of the frozen base model: none, or nf4 (QLoRA; needs the extra `qlora`)
    gradient_checkpointing    recompute activations in the backward pass, all but those of attention: much less memory
                              for up to half more time; auto: in as many layers as the free memory of the GPU requires
    activation_offload        keep the activations between layers in the host's memory, and recompute attention too:
                              least GPU memory, for very long rows; needs gradient_checkpointing
    attn_implementation       attention of the base model: sdpa, eager, flash_attention_2, flash_attention_3, or auto:
                              FlashAttention where the package is installed and there is a GPU, else sdpa
    threads                   CPU threads of torch; null: torch's default; 1 is by far the fastest for models of a few
                              million parameters, and if vLLM runs on the same cores
    """

    lora_r: int = 8
    target_modules: str | Sequence[str] = "all-linear"
    exclude_modules: Sequence[str] = ()
    token_budget: int = 8192
    dtype: str = AUTO
    share_prefixes: bool = True
    quantization: str = "none"
    gradient_checkpointing: bool | Literal["auto"] = AUTO
    activation_offload: bool = False
    attn_implementation: str = AUTO
    threads: int | None = None

    def __post_init__(self) -> None:
        self.check_shared()

    def check_shared(self) -> None:
        """Raise SettingError if a field of this class is out of range."""
        self._require("lora_r", 1 <= self.lora_r <= MAX_SERVABLE_RANK, f"an integer from 1 to {MAX_SERVABLE_RANK}")
        self._require("target_modules", bool(self.target_modules), '"all-linear" or the names of linear layers')
        self._require("token_budget", self.token_budget >= 1, "at least 1, such as 8192")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("quantization", self.quantization in QUANTIZATIONS, f"one of {', '.join(QUANTIZATIONS)}")
        checkpointing = self.gradient_checkpointing
        self._require("gradient_checkpointing", checkpointing in (True, False, AUTO), "true, false or auto")
        self._require(
            "activation_offload",
            not self.activation_offload or bool(checkpointing),
            "false, unless gradient_checkpointing is true or auto",
        )
        names = ", ".join(ATTENTIONS)
        self._require("attn_implementation", self.attn_implementation in ATTENTIONS, f"one of {names}")
        self._require("threads", self.threads is None or self.threads >= 1, "None or at least 1")

    def _require(self, field: str, valid: bool, remedy: str) -> None:
        if not valid:
            raise SettingError(f"learner.{field} is {getattr(self, field)!r}; it must be {remedy}")


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


MAX_PORT = 65535
MAX_BODY_MB = 4095  # a frame's length has 32 bits

# How several processes hold the base model.
SHARDINGS = ("none", "fsdp2")


@dataclass(frozen=True, slots=True)
class LearnerProcessSettings(AdapterAndMemorySettings):
    """What the learner of one base model is started with. Raises SettingError for values out of range.

    devices                   GPUs of the learner: 0, or 0,1, or UUIDs; null: those in CUDA_VISIBLE_DEVICES, of which
                              `ratchet up` leaves the first to vLLM, if there are enough for both
    num_processes             training processes of each machine, started by torchrun
    gpu_memory_utilization    share of each of its GPUs that the learner may take; null: all that is free, but beside
                              vLLM on one GPU `ratchet up` sets what `vllm.gpu_memory_utilization` leaves
    sharding                  how the processes hold the base model: none, each has a copy; or fsdp2, each has a part of
                              every layer (torch's fully_shard), for models that do not fit one GPU; not with nf4
    machines                  machines of the learner; each runs `ratchet learner` with its num_processes
    machine_rank              number of this machine, from 0; null: SLURM_PROCID, JOB_COMPLETION_INDEX or RANK
    leader                    address of machine 0, which the others connect to; null: MASTER_ADDR
    leader_port               port of machine 0 for the others
    url                       address of a learner that is started elsewhere, such as http://gpu1:8002; null: `ratchet
                              up` and `ratchet trainer` start one
    host                      address that the learner listens on; any but loopback requires RATCHET_LEARNER_TOKEN
    port                      port that the learner listens on; 0: any free one, which `ratchet up` and `ratchet
                              trainer` take too unless a port is set
    max_body_mb               largest request of a controller, a round's rows, in MiB
    """

    devices: Devices = None
    num_processes: int = 1
    machines: int = 1
    machine_rank: int | None = None
    leader: str | None = None
    leader_port: int = 29500
    url: PlainUrl | None = None
    host: str = "127.0.0.1"
    port: int = 8002
    max_body_mb: int = 1024
    gpu_memory_utilization: float | None = None
    sharding: str = "none"

    def __post_init__(self) -> None:
        self.check_shared()
        self._require("num_processes", self.num_processes >= 1, "at least 1")
        self._require("machines", self.machines >= 1, "at least 1")
        rank = self.machine_rank
        self._require("machine_rank", rank is None or 0 <= rank < self.machines, "null, or from 0 to machines - 1")
        self._require("leader_port", 0 < self.leader_port <= MAX_PORT, "a port, such as 29500")
        self._require("port", 0 <= self.port <= MAX_PORT, "a port, such as 8002, or 0")
        self._require("max_body_mb", 1 <= self.max_body_mb <= MAX_BODY_MB, f"from 1 to {MAX_BODY_MB}")
        share = self.gpu_memory_utilization
        self._require("gpu_memory_utilization", share is None or 0 < share <= 1, "null, or above 0 and at most 1")
        self._require("sharding", self.sharding in SHARDINGS, f"one of {', '.join(SHARDINGS)}")
        self._require(
            "sharding",
            self.sharding == "none" or self.quantization == "none",
            "none with learner.quantization nf4, whose packed weights cannot be sharded: with fsdp2 the base model "
            "stays in bf16, so set learner.quantization to none",
        )


def _checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except SettingError as error:
        raise ValueError(str(error)) from error


CheckedByPydantic = WrapValidator(_checked)  # pydantic collects no other errors than its own and ValueError

# What an agent and its learner both have: those of the learner apply.
_SHARED = tuple(field.name for field in fields(AdapterAndMemorySettings))


def process_settings_of(
    settings: LearnerSettings, process: LearnerProcessSettings | None = None
) -> LearnerProcessSettings:
    """Return the settings of a learner whose only agent has these."""
    shared = {name: getattr(settings, name) for name in _SHARED}
    return replace(process or LearnerProcessSettings(), **shared)


def with_shared(settings: LearnerSettings, process: LearnerProcessSettings) -> LearnerSettings:
    """Return an agent's settings with what all agents of its learner share; its token_budget may be smaller."""
    shared = {name: getattr(process, name) for name in _SHARED if name != "token_budget"}
    return replace(settings, **shared, token_budget=min(settings.token_budget, process.token_budget))
