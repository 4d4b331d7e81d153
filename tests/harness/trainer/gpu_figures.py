"""What the GPU benchmark computes with: model shapes, the operations of a LoRA step, peak rates of GPUs; its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

LENGTHS = {"7b": (8192, 32768, 131072), "tiny": (32, 64, 128)}
TOKENS_PER_STEP = {"7b": 32768, "tiny": 128}

# Dense bf16 with fp32 accumulation, operations per second, from the vendors' data sheets.
# Part of the name that torch reports, the most specific first.
_PEAKS = (
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("RTX 6000 Ada", 364e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX A6000", 155e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """One case. `mfu` is None without a known peak, `peak_gib` without a GPU; `missing` says why there is no figure."""

    what: str
    length: int
    rows: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    plan_gib: float | None = None
    missing: str = ""


def rows_of(shape: str, length: int) -> int:
    """Return the rows of one step."""
    return max(1, TOKENS_PER_STEP[shape] // length)


def config_of(shape: str) -> Qwen2Config:
    """Return Qwen2.5-7B's configuration, or a small one."""
    sizes: dict[str, Any] = (
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072}
        if shape == "7b"
        else {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 1024}
    )  # fmt: skip
    return Qwen2Config(tie_word_embeddings=False, rope_theta=1e6, use_cache=False, **sizes)


def build_model(shape: str, device: torch.device) -> Any:
    """Return a model with random weights, made on the device; in bf16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)


def step_flops(shape: str, rows: int, length: int) -> tuple[float, float]:
    """Return the operations of a LoRA step that MFU counts: of linear layers, and of attention."""
    config = config_of(shape)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head_dim = hidden // config.num_attention_heads
    projections = 2 * hidden * hidden + 2 * hidden * config.num_key_value_heads * head_dim
    weights = layers * (projections + 3 * hidden * config.intermediate_size) + hidden * config.vocab_size
    return 4.0 * weights * rows * length, 6.0 * rows * length**2 * hidden * layers


def peak_flops(name: str) -> float | None:
    """Return the peak of a device by its name; None if it is not listed."""
    return next((peak for part, peak in _PEAKS if part in name), None)


def line(case: GpuFigures) -> str:
    """Return a case as a line of the table."""
    size = f"{case.rows} x {case.length:,}"
    if case.missing:
        return f"| {case.what} | {size} | {case.missing} | | | | |"
    figures = (
        f"{case.seconds:.3f}",
        f"{case.tokens_per_second:,.0f}" if case.tokens_per_second else "",
        f"{case.mfu:.1%}" if case.mfu else "",
        f"{case.peak_gib:.1f}" if case.peak_gib else "",
        f"{case.plan_gib:.1f}" if case.plan_gib else "",
    )
    return f"| {case.what} | {size} | {' | '.join(figures)} |"


def speedups(cases: Sequence[GpuFigures]) -> list[str]:
    """Return the learner's speed over TRL's for each length."""
    seconds = {(case.what, case.length): case.seconds for case in cases if case.seconds}
    return [
        f"rows of {length:,} tokens: {seconds['trl sft', length] / own:.2f} times as fast as TRL's SFTTrainer"
        for (what, length), own in seconds.items()
        if what == "ratchet" and ("trl sft", length) in seconds
    ]
