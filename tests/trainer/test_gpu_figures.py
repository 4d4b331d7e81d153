"""The GPU benchmark counts the operations that it says it counts, and carries the versions that are tested here."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.trainer.gpu_figures import build_model, peak_flops, step_flops

ROOT = Path(__file__).parents[2]


def test_mfu_counts_the_forward_pass_and_the_gradient_of_the_activations() -> None:
    rows, length = 2, 64
    model = build_model("tiny", torch.device("cpu")).requires_grad_(False)
    embedded = torch.randn(rows, length, model.config.hidden_size, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        model(inputs_embeds=embedded).logits.sum().backward()
    products = counter.get_flop_counts()["Global"]
    linear = sum(count for operator, count in products.items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    counted, attention = step_flops("tiny", rows, length)
    assert counted == linear
    # One causal row: two products of L x L / 2 x hidden forward, four backward; 2 operations each.
    assert attention == 6 * 2 * (length**2 / 2) * 64 * rows * 2


def test_peaks_are_found_by_the_name_that_torch_reports() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L40") != peak_flops("NVIDIA L4")
    assert peak_flops("unknown") is None


def test_the_carried_wheels_are_the_versions_tested_here() -> None:
    pins = re.findall(r"\b([a-z]+)==([\d.]+)", (ROOT / "benchmarks" / "gpu_wheels.sh").read_text())
    assert ("trl", importlib.metadata.version("trl")) in pins
    installed = {name: importlib.metadata.version(name) for name, _ in pins}
    assert dict(pins) == installed
