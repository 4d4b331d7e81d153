"""The learner's GPU memory: its share of a GPU that vLLM uses too, and how the lack of memory is recognised.

Torch keeps what a round allocated. On a shared GPU it is limited to its share, so that it never takes memory that vLLM
allocates later, and gives back after each round what it does not hold. Without a GPU nothing here has an effect.
"""

from __future__ import annotations

import os

import torch

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
