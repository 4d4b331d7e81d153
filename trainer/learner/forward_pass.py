"""The forward pass over a micro-batch: logprobs and entropies of its trained tokens.

The LM head (lm_head.py) gets only the positions that predict a trained token: prompts and tool results need no logits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # other families import it too
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.activations import ActivationMemory
from ratchet.trainer.learner.lm_head import HeadFunction, token_logprobs
from ratchet.trainer.learner.micro_batches import Micro


@dataclass(frozen=True, slots=True)
class Scored:
    """Values of the trained tokens, 0 elsewhere, (N, T) each in fp32; and the router's loss if requested."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: torch.Tensor | None


class ForwardPass:
    """Runs a causal language model without its logits; `base` is that model without wrappers, its head is frozen.

    `base.forward` is replaced, because the wrappers of PEFT and FSDP call it inside of what they prepare; other calls
    of the model are unchanged. Raises ValueError if the adapter trains the head.
    """

    def __init__(self, base: Any, memory: ActivationMemory) -> None:
        self._micro: Micro | None = None
        self._base = base
        self._dtype: torch.dtype = base.get_input_embeddings().weight.dtype
        self._config = base.config
        self._implementation: str = base.config._attn_implementation
        self._memory = memory
        self._head_function = HeadFunction.of(base.config.get_text_config())
        if any(parameter.requires_grad for parameter in base.get_output_embeddings().parameters()):
            raise ValueError("it includes the LM head, which gets no adapter")
        plain = base.forward

        @functools.wraps(type(base).forward)  # transformers reads the signature when it generates
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if self._micro is None else self._score(self._micro, *args, **kwargs)

        base.forward = MethodType(forward, base)

    @property
    def padding_free(self) -> bool:
        """Whether attention takes rows of different lengths as one sequence without a mask."""
        return self._implementation.startswith("flash_attention")

    def __call__(self, model: Any, micro: Micro, *, router: bool = False) -> Scored:
        """Score a micro-batch with `model`, which wraps the base model or is it; `router`: with the router's loss."""
        self._micro = micro
        # Trees need a mask, which only SDPA accepts. The backward pass recomputes with what is set here.
        self._config._attn_implementation = "sdpa" if "until" in micro else self._implementation
        more = {"output_router_logits": True} if router else {}
        try:
            with self._memory.forward_pass(micro["forwarded_ids"].numel()):
                scored: Scored = model(
                    input_ids=micro["forwarded_ids"], **self._attention(micro, padding_counts=router), **more
                )
        finally:
            self._micro = None
        return scored

    def _score(self, micro: Micro, *args: Any, labels: None = None, **kwargs: Any) -> Scored:
        """Return what the base model computes for the micro-batch, in place of its `forward`."""
        output = self._base.base_model(*args, **(kwargs | {"use_cache": False}))
        hidden = output.last_hidden_state.flatten(0, 1)[micro["predicting"]]  # (K, H)
        logprobs, entropies = token_logprobs(
            hidden,
            self._base.get_output_embeddings(),
            micro["targets"],
            micro["temperatures"],
            self._head_function,
            micro.get("truncation"),
        )
        trained = micro["trained"]  # (N, T)
        logprobs, entropies = (
            each.new_zeros(trained.shape).masked_scatter(trained, each) for each in (logprobs, entropies)
        )
        balance = self._router_loss(output, kwargs) if kwargs.get("output_router_logits") else None
        return Scored(logprobs, entropies, balance)

    def _router_loss(self, output: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss that balances the router, (): Fedus et al. 2021, "Switch transformers", equations 4 to 6."""
        experts, chosen = (
            getattr(self._base, name, None) or getattr(self._config.get_text_config(), name)
            for name in ("num_experts", "num_experts_per_tok")
        )
        loss: torch.Tensor = load_balancing_loss_func(
            output.router_logits, experts, chosen, kwargs.get("attention_mask")
        )
        return loss

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
