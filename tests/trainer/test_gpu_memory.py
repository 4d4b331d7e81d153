"""Claims about the learner's GPU memory: every form of its lack is recognised, and a shared GPU is really shared."""

from __future__ import annotations

import os

import pytest
import torch

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import gpu_memory
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings

GIB = 2**30


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_every_form_in_which_memory_ends_is_recognised(error: BaseException) -> None:
    assert gpu_memory.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
        ValueError("out of memory"),
    ],
)
def test_other_failures_are_not_taken_for_it(error: BaseException) -> None:
    assert not gpu_memory.is_out_of_memory(error)


@pytest.mark.parametrize(("own", "found"), [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "x:1"}, None)])
def test_blocks_grow_unless_the_user_set_the_allocator(
    own: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    gpu_memory.extend_segments()
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == found


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "share", "expected"),
    [(60, 15, 10, 1.0, 65), (60, 15, 10, 0.4, 22), (5, 20, 18, 0.4, 7), (0, 32, 32, 0.4, 0)],
)
def test_what_is_free_respects_the_learners_share(
    free: int, reserved: int, allocated: int, share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("mem_get_info", (free * GIB, 80 * GIB)), ("memory_reserved", reserved * GIB),
        ("memory_allocated", allocated * GIB), ("get_per_process_memory_fraction", share),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert gpu_memory.free_bytes() == expected * GIB


def test_a_share_that_is_none_or_more_than_a_gpu_is_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(SettingError, match=r"gpu_memory_utilization is .* must be null, or above 0"):
            LearnerProcessSettings(gpu_memory_utilization=share)
