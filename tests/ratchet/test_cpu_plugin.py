"""vLLM on CPU loads the plug-in that computes adapters, and gives what vLLM's operators give where those are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ratchet.settings.project_settings import Settings
from ratchet.supervisor.vllm_command import CPU_PLUGIN, build_command
from tests.harness.cli.project import ROOT

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
# Prints, for random batches: the largest difference between vLLM's operators and the plug-in's; what a token without an
# adapter gets beside one of the last slot; and what the rows of prompt logprobs without a slot get at the LM head.
PROGRAM = """
import json
import torch
from vllm.lora.ops.torch_ops import lora_ops
theirs = {name: getattr(lora_ops, name) for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")}
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
from vllm.lora.punica_wrapper import punica_cpu
torch.manual_seed(0)
far = {}
for kind in (torch.float32, torch.bfloat16):
    a, b = torch.randn(3, 1, 8, 24).to(kind), torch.randn(3, 1, 20, 8).to(kind)
    for slots in ([0, 2, 1, 0, 2], [1, 1, 1, 1, 1], [2]):
        slots = torch.tensor(slots)
        inputs, inner = torch.randn(len(slots), 24).to(kind), torch.randn(len(slots), 8)
        for name, matrix, x, width, more in (
            ("bgmv_shrink", a, inputs, 8, (2.0,)), ("bgmv_expand", b, inner, 17, (True,)),
            ("bgmv_expand", b, inner, 20, (False,)), ("bgmv_expand_slice", b, inner, 40, (10, 20, True)),
        ):
            start = torch.randn(len(slots), width).to(torch.float32 if name == "bgmv_shrink" else kind)
            old, new = start.clone(), start.clone()
            theirs[name](x, matrix, old, slots, *more)
            getattr(punica_cpu, name)(x, matrix, new, slots, *more)
            difference = ((old - new).abs().max() / old.abs().max()).item()
            far[str(kind)] = max(far.get(str(kind), 0.0), difference)
slots = torch.stack([torch.zeros(1, 3), torch.ones(1, 3)])
out = torch.full((2, 1), 7.0)
punica_cpu.bgmv_shrink(torch.ones(2, 3), slots, out, torch.tensor([1, -1]), 2.0)
lengths, starts = torch.tensor([1, 1]), torch.tensor([0, 1])
other = torch.full((2, 1), 7.0)
punica_cpu.sgmv_shrink(torch.ones(2, 3), slots, other, starts, lengths, torch.tensor([1, -1]), 2, 1, 2, 2.0)
rows = torch.full((4, 1), 7.0)
punica_cpu.bgmv_expand(torch.ones(4, 3), slots, rows, torch.tensor([1, 0]), True)
print(json.dumps({"far": far, "lone": [out.flatten().tolist(), other.flatten().tolist()], "rows": rows.tolist()}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the program prints with the plug-in on its path, as `up` starts vLLM."""
    engine = build_command(Settings.of({"base_model": str(POLICY)}), 8001, gpu=False)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | dict(engine.environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_one_product_per_adapter_equals_vllms_own_operators(seen: dict[str, Any]) -> None:
    assert seen["far"]["torch.float32"] < 1e-5
    assert seen["far"]["torch.bfloat16"] < 0.02  # a rounding of bfloat16 is 0.004


@pytest.mark.slow
def test_a_token_without_an_adapter_gets_nothing_of_the_one_in_the_last_slot(seen: dict[str, Any]) -> None:
    assert seen["lone"] == [[6.0, 0.0], [6.0, 0.0]]


@pytest.mark.slow
def test_rows_of_prompt_logprobs_without_a_slot_are_left_as_they_are(seen: dict[str, Any]) -> None:
    assert seen["rows"] == [[10.0], [7.0], [7.0], [7.0]]


def test_on_a_gpu_vllm_is_left_as_it_is() -> None:
    engine = build_command(Settings.of({"base_model": str(POLICY)}), 8001, gpu=True)
    assert "PYTHONPATH" not in engine.environment


def test_the_folder_that_vllm_is_pointed_at_holds_the_plugin_and_how_it_is_found() -> None:
    assert (CPU_PLUGIN / "ratchet_vllm_cpu.py").is_file()
    (found,) = CPU_PLUGIN.glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]" in found.read_text()
