"""The learner's GPU memory: its share of a GPU that vLLM uses too, and how the lack of memory is recognised.

Torch keeps what a round allocated. On a shared GPU it is limited to its share, so that it never takes memory that vLLM
allocates later, and gives back after each round what it does not hold. Without a GPU nothing here has an effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from ratchet.trainer.errors import SettingError

_SETTINGS_OF_TORCH = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# In lower case. Libraries that find no memory for their workspaces say so in their own words: cuBLAS and cuDNN call
# it NOT_INITIALIZED where it meets their handle. NCCL quotes CUDA's "out of memory".
_SIGNS = (
    "out of memory",
    "out_of_memory",  # of the CUDA driver
    "memoryallocation",  # cudaErrorMemoryAllocation
    "can't allocate memory",  # of torch on a CPU
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error_host_allocation_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is used up, on a GPU or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def extend_segments() -> None:
    """Let torch grow its blocks of memory, which keeps rounds of other lengths from fragmenting it.

    Must be called before the first allocation. An own setting of torch's allocator in the environment stays.
    """
    if not any(name in os.environ for name in _SETTINGS_OF_TORCH):
        os.environ[_SETTINGS_OF_TORCH[0]] = "expandable_segments:True"


def limit(share: float | None) -> None:
    """Limit torch to this share of the process's GPU; None: no limit. Beyond it torch raises OutOfMemoryError."""
    if share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(float(share))


def give_back(share: float | None) -> None:
    """Give memory that torch holds unused to the other users of a shared GPU."""
    if share is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes() -> int:
    """Return the bytes that torch may still use: free on the GPU or cached by torch, and within its limit."""
    free, total = torch.cuda.mem_get_info()
    allowed = int(torch.cuda.get_per_process_memory_fraction() * total)
    available = min(int(free) + torch.cuda.memory_reserved(), allowed)
    return max(0, int(available) - int(torch.cuda.memory_allocated()))


# Activation memory: what the backward pass recomputes, and what waits for it in the host's memory.
#
# With gradient checkpointing a decoder layer keeps its input and the output of its attention, and recomputes the rest
# in the backward pass. Attention is kept because its work grows with the square of the row's length and its output does
# not: at 128k tokens of a 7B model, recomputing it would cost two thirds of a forward pass. The backward pass of a LoRA
# step costs as much as its forward pass, so recomputing a layer takes half more time: `auto` recomputes only as many
# layers as the GPU's free memory requires, micro-batch by micro-batch. What a layer needs is measured in the first one.
# Off-loading keeps the layers' inputs in pinned host memory; it then recomputes every layer with its attention, because
# what a checkpoint keeps is not off-loaded.

# Operators of attention by namespace and name; torch registers those of its own kernels, flash-attn its own.
_ATTENTION = (
    ("aten", "_scaled_dot_product_flash_attention"),
    ("aten", "_scaled_dot_product_efficient_attention"),
    ("aten", "_scaled_dot_product_cudnn_attention"),
    ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("flash_attn", "_flash_attn_forward"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "fwd"),
)
_LEAST_OFFLOADED = 1 << 16  # elements; smaller tensors are not worth a copy
_USABLE = 0.85  # of the free memory; the rest is fragmentation and the allocator's rounding
# Layers' worth of memory that the backward pass of one layer needs: its recomputed activations and their gradients.
_WORKING_LAYERS = 3


def checkpoints(setting: bool | Literal["auto"]) -> bool:
    """Return whether activations may be recomputed; auto: with a GPU, whose memory they fill first."""
    return torch.cuda.is_available() if setting == "auto" else setting


class ActivationMemory:
    """Decides for each training pass of a model which layers it recomputes. Raises SettingError if none can be."""

    def __init__(self, base: Any, setting: bool | Literal["auto"], *, offload: bool) -> None:
        self._offload = offload
        self._bytes_per_token = 0.0  # of a layer that is not recomputed; 0: not measured
        self._layers: list[Any] = []
        if not checkpoints(setting):
            return
        kwargs: dict[str, Any] = {"use_reentrant": False}
        if not offload:
            kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        try:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        except ValueError as error:
            raise SettingError(
                f"learner setting gradient_checkpointing does not fit the base model: {error} Set it to false"
            ) from error
        if setting == "auto" and not offload:
            decoder = base.get_decoder()
            self._layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]

    @contextmanager
    def forward_pass(self, tokens: int) -> Iterator[None]:
        """Run the forward pass of a micro-batch of that many padded tokens."""
        training = torch.is_grad_enabled()
        offloading = self._offload and training
        with saved_tensors_hooks(_to_host, _to_device) if offloading else nullcontext():
            if not self._layers or not training:
                yield
            elif self._bytes_per_token:
                self._keep(self._layers_that_fit(tokens))
                yield
            else:
                self._keep(1)
                with _saved_by(self._layers[0]) as saved:
                    yield
                self._bytes_per_token = sum(saved.values()) / tokens

    def _keep(self, layers: int) -> None:
        """Let the first layers keep their activations, and the others recompute them."""
        for place, layer in enumerate(self._layers):
            layer.gradient_checkpointing = place >= layers

    def _layers_that_fit(self, tokens: int) -> int:
        """Return how many layers can keep their activations.

        A recomputed layer keeps two tensors of the hidden size; they are less than a tenth of its activations.
        """
        layer = tokens * self._bytes_per_token
        checkpointed = len(self._layers) * layer / 10
        spare = _USABLE * free_bytes() - _WORKING_LAYERS * layer - checkpointed
        return max(0, min(len(self._layers), int(spare / layer)))


@contextmanager
def _saved_by(layer: Any) -> Iterator[dict[int, int]]:
    """Collect the bytes of the storages that a layer saves for the backward pass, without its weights."""
    weights: set[int] = set()
    saved: dict[int, int] = {}

    def begin(*_: Any) -> None:  # those of a sharded layer are whole only while it computes
        weights.update(parameter.untyped_storage().data_ptr() for parameter in layer.parameters())
        hooks.__enter__()

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = saved_tensors_hooks(record, lambda tensor: tensor)
    before = layer.register_forward_pre_hook(begin)
    after = layer.register_forward_hook(lambda *_: hooks.__exit__(None, None, None), always_call=True)
    try:
        yield saved
    finally:
        before.remove()
        after.remove()


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(operator, "namespace", ""), operator.__name__.split(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _to_host(tensor: torch.Tensor) -> Any:
    """Copy an activation to the host. Copies of one stream are in order, so nothing waits for them."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.numel() < _LEAST_OFFLOADED:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _to_device(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    moved: torch.Tensor = host.to(device, non_blocking=True)
    return moved
