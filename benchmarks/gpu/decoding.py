"""The process beside the learner in `benchmarks.gpu.speed`: it holds memory and reads it as decoding does.

A module of its own, because a spawned process imports it: torch alone starts in seconds.
"""

from __future__ import annotations

from typing import Any

import torch

HELD = 0.45  # share of the GPU's memory


def decode(where: str, stop: Any, ready: Any, passes: Any) -> None:
    """Hold memory and multiply 32 vectors by weights again and again, as decoding does."""
    device = torch.device(where)
    size = int(HELD * torch.cuda.get_device_properties(0).total_memory) if device.type == "cuda" else 2**22
    width = 4096 if device.type == "cuda" else 64
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = torch.randn(width, width, device=device, dtype=dtype) / width**0.5
    held = torch.empty(max(2, size // weights.nbytes), width, width, device=device, dtype=dtype).copy_(weights)
    vectors = torch.randn(32, width, device=device, dtype=dtype)
    ready.set()
    while not stop.is_set():
        for matrix in held[: 7 * 2**30 // weights.nbytes if device.type == "cuda" else 2]:
            vectors = vectors @ matrix
        vectors = vectors.clamp(-1, 1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        passes.value += 1
