"""Claims about the learner's GPU memory: every form of its lack is recognised, and a shared GPU is really shared."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import gpu_memory
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings
from tests.harness.trainer.gpu_shapes import build_model, group_rows, peak_flops, step_flops

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


CPU = torch.device("cpu")


def test_mfu_counts_the_forward_pass_and_the_gradient_of_the_activations() -> None:
    rows, length = 2, 64
    model = build_model("tiny", CPU, dtype=torch.float32).requires_grad_(False)
    embedded = torch.randn(rows, length, model.config.hidden_size, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        model(inputs_embeds=embedded).logits.sum().backward()
    products = counter.get_flop_counts()["Global"]
    linear = sum(count for operator, count in products.items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    counted, attention = step_flops(model.config, [length] * rows, trained=rows * length)
    assert counted == linear
    # One causal row: two products of L x L / 2 x hidden forward, four backward; 2 operations each.
    assert attention == 6 * 2 * (length**2 / 2) * 64 * rows * 2


def test_a_token_meets_only_the_experts_that_it_is_routed_to() -> None:
    config = build_model("tiny-moe", CPU, dtype=torch.float32).config
    linear, _ = step_flops(config, [1], trained=0)
    attention = 2 * 64 * 64 + 2 * 64 * 32
    assert linear == 4 * 2 * (attention + 2 * 3 * 64 * 32 + 64 * 4)


def test_peaks_are_found_by_the_name_that_torch_reports() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L40") != peak_flops("NVIDIA L4")
    assert peak_flops("unknown") is None


def test_rows_of_a_group_share_a_prompt_and_a_quarter_of_their_tokens_is_trained() -> None:
    rows = group_rows(1000, 60_000, 16_384)
    assert 60_000 <= sum(len(row.ids) for row in rows) < 180_000
    assert max(len(row.ids) for row in rows) <= 16_384
    assert 0.18 < sum(row.tokens_trained for row in rows) / sum(len(row.ids) for row in rows) < 0.27
    first = rows[:8]
    shared = next(place for place in range(min(len(r.ids) for r in first)) if len({r.ids[place] for r in first}) > 1)
    assert shared >= 4
    assert all(not any(row.mask[:shared]) for row in first)
