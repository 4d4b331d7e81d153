"""The settings that an agent and its learner both have: the shape of the adapters, and how rows are computed.

All agents of a learner share them, so those of the learner apply. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.trainer.errors import SettingError

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
