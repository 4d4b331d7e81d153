"""The forward pass over a micro-batch: logprobs and entropies of its trained tokens.

A hook between the model's body and its LM head keeps only the positions that predict a trained token, and applies the
row's temperature: prompts and tool results need no logits. Other calls of the model are unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.activations import ActivationMemory
from ratchet.trainer.learner.micro_batches import Micro


@dataclass(frozen=True, slots=True)
class Scored:
    """Values of the trained tokens, 0 elsewhere, (N, T) each; and the router's loss if requested."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: torch.Tensor | None


class ForwardPass:
    """Runs a causal language model with TRL's fused LM head; `base` is that model without wrappers.

    The head computes logits in tiles of tokens and vocabulary, forward and backward, so they are never whole in memory.
    """

    def __init__(self, base: Any, memory: ActivationMemory) -> None:
        self._micro: Micro | None = None
        self._dtype: torch.dtype = base.get_input_embeddings().weight.dtype
        self._config = base.config
        self._implementation: str = base.config._attn_implementation
        self._memory = memory
        base.base_model.register_forward_hook(self._keep_predicting)

    @property
    def padding_free(self) -> bool:
        """Whether attention takes rows of different lengths as one sequence without a mask."""
        return self._implementation.startswith("flash_attention")

    def __call__(self, model: Any, micro: Micro, **router: bool) -> Scored:
        """Score a micro-batch with `model`, which wraps the base model or is it."""
        self._micro = micro
        # Trees need a mask, which only SDPA accepts. The backward pass recomputes with what is set here.
        self._config._attn_implementation = "sdpa" if "until" in micro else self._implementation
        try:
            with self._memory.forward_pass(micro["forwarded_ids"].numel()):
                output = model(
                    input_ids=micro["forwarded_ids"],
                    **self._attention(micro, padding_counts=bool(router)),
                    shift_labels=micro["targets"][None],  # (1, K)
                    fused_lm_head=True,
                    **router,
                )
        finally:
            self._micro = None
        trained = micro["trained"]  # (N, T)
        logprobs, entropy = (
            scored.new_zeros(trained.shape).masked_scatter(trained, scored)
            for scored in (output.log_probs, output.entropy)  # (1, K) each
        )
        return Scored(logprobs, entropy, output.aux_loss if router else None)

    def _attention(self, micro: Micro, *, padding_counts: bool) -> dict[str, Any]:
        """Return what attention needs: the ends of rows, a padding mask, or (M, 1, L, L) along the branches of trees.

        Padding is to the right and attention is causal, so a trained token never sees it: without a mask the result is
        the same, and attention uses its fastest kernel. The router's loss counts padding unless it gets the mask.
        """
        if "cu_seq_lens" in micro:
            ends, max_length = micro["cu_seq_lens"], int(micro["max_length"])
            return {
                "position_ids": micro["positions"],
                "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max_length, "max_length_k": max_length,
            }  # fmt: skip
        if "until" not in micro:
            return {"attention_mask": micro["attended"]} if padding_counts else {}
        until = micro["until"]  # (M, L)
        place = torch.arange(until.shape[1], device=until.device)
        visible = (place <= place[:, None]) & (place[:, None] < until[:, None, :])  # (M, L, L)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=until.device)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        return {"attention_mask": mask[:, None], "position_ids": micro["positions"]}

    def _keep_predicting(self, module: Any, inputs: Any, output: Any) -> Any:
        """Reduce hidden states (M, L, H) to (1, K, H) and divide them by temperature: W (h / t) = logits / t."""
        if self._micro is None:
            return output
        hidden = output.last_hidden_state.flatten(0, 1)[self._micro["predicting"]]  # (K, H)
        temperature = self._micro["temperatures"][:, None]  # (K, 1) fp32: bf16 would bias 0.7 by 0.04%
        output.last_hidden_state = (hidden.float() / temperature).to(hidden.dtype)[None]
        return output


def choose_attention(model: Any, setting: str) -> None:
    """Set the attention of a loaded model. Raises SettingError if it cannot run here or does not fit the model.

    auto: FlashAttention where it is installed, the model supports it and there is a GPU; else what the model was loaded
    with, which is SDPA wherever the model supports it.
    """
    flash = (is_flash_attn_3_available, "flash_attention_3"), (is_flash_attn_2_available, "flash_attention_2")
    usable = [name for installed, name in flash if torch.cuda.is_available() and installed()]
    if setting == "auto":
        if not usable or not model._supports_flash_attn:
            return
        chosen = usable[0]
    elif setting.startswith("flash_attention") and setting not in usable:
        raise SettingError(
            f"learner setting attn_implementation is {setting!r}, which needs a GPU and the package flash-attn: "
            "install it, or set attn_implementation to auto or sdpa"
        )
    else:
        chosen = setting
    try:
        model.set_attn_implementation(chosen)
    except ValueError as error:
        raise SettingError(
            f"learner setting attn_implementation is {setting!r}, which does not fit the base model: {error} "
            "Set it to auto"
        ) from error


# Model types that accept any attention mask and explicit positions; tests/trainer/test_shared_prefixes.py checks them.
SHARING_MODEL_TYPES = ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")


def attention_pairs_per_token(base: Any) -> float | None:
    """Return the `pairs_per_token` of trainer/learner/shared_prefixes.py; None if rows cannot share a sequence.

    They cannot if attention is windowed or its implementation accepts no custom mask.
    """
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if config.model_type not in SHARING_MODEL_TYPES or kinds != {"full_attention"} or windowed:
        return None
    if config._attn_implementation != "sdpa" and not config._attn_implementation.startswith("flash_attention"):
        return None
    head = base.get_output_embeddings()
    linear = sum(
        module.in_features * module.out_features
        for module in base.modules()
        if module is not head and isinstance(module, torch.nn.Linear)
    )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = 2 * config.num_hidden_layers * config.num_attention_heads * dim
    return float(linear / pairs)
