"""vLLM on CPU loads the plugin that keeps adapters away from requests that have none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ratchet.settings.project_settings import Settings
from ratchet.supervisor.vllm_command import CPU_PLUGIN, build_command
from tests.harness.cli.project import ROOT

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
# Two slots, of which the second holds an adapter; a token of it, and one without an adapter.
PROGRAM = """
import json
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
from vllm.lora.punica_wrapper import punica_cpu
slots = torch.stack([torch.zeros(1, 3), torch.ones(1, 3)])
out = torch.full((2, 1), 7.0)
punica_cpu.bgmv_shrink(torch.ones(2, 3), slots, out, torch.tensor([1, -1]), 2.0)
lengths, starts = torch.tensor([1, 1]), torch.tensor([0, 1])
other = torch.full((2, 1), 7.0)
punica_cpu.sgmv_shrink(torch.ones(2, 3), slots, other, starts, lengths, torch.tensor([1, -1]), 2, 1, 2, 2.0)
print(json.dumps([out.flatten().tolist(), other.flatten().tolist()]))
"""


@pytest.mark.slow
def test_a_token_without_an_adapter_gets_nothing_of_the_one_in_the_last_slot() -> None:
    engine = build_command(Settings.model_validate({"base_model": str(POLICY)}), 8001, gpu=False)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | dict(engine.environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[6.0, 0.0], [6.0, 0.0]]


def test_on_a_gpu_vllm_is_left_as_it_is() -> None:
    engine = build_command(Settings.model_validate({"base_model": str(POLICY)}), 8001, gpu=True)
    assert "PYTHONPATH" not in engine.environment


def test_the_folder_that_vllm_is_pointed_at_holds_the_plugin_and_how_it_is_found() -> None:
    assert (CPU_PLUGIN / "ratchet_vllm_cpu.py").is_file()
    (found,) = CPU_PLUGIN.glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]" in found.read_text()
