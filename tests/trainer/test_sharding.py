"""Claims about one, two and four processes, each with a copy of the base model or with a part of it (FSDP2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.trainer.errors import SettingError
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings
from tests.harness.trainer.model_shapes import SHAPES, build_shape
from tests.harness.trainer.sharded_learners import LAYOUTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CASES = LAYOUTS[0].cases
RUNS = [(group.name, case) for group in LAYOUTS for case in group.cases]
SHARDED = [(name, case) for name, case in RUNS if name.startswith("fsdp2")]
# Processes add the same terms in another order, so a sum of n fp32 terms differs by about 1e-7 of the sum of their
# sizes; Adam divides by the gradient's own size, which enlarges that where terms cancel. Measured: 5e-7 of the change.
CHANGE = 1e-5
FIGURES = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every group of processes did every case."""
    models, found = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("groups")
    for shape in SHAPES:
        build_shape(shape, models / shape)
    program = [sys.executable, "-m", "tests.harness.trainer.sharded_learners", str(models), str(found)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(program, cwd=ROOT, env=environment, timeout=500, check=True)
    for log in found.glob("*.log"):
        assert log.read_text().endswith("ended with 0\n"), log.read_text()[-3000:]
    return found


def found_by(folder: Path, group: str, case: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / group / case / "found.json").read_text())
    return read


def second_matrices(checkpoint: Path) -> torch.Tensor:
    """The adapter's second matrices, which began as 0: all that training changed in them."""
    weights = load_file(checkpoint / "learner" / "lora.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights) if "lora_B" in name])


@pytest.mark.parametrize(("group", "case"), [run for run in RUNS if run[0] != "none1"])
def test_any_number_of_processes_and_any_sharding_train_the_same_adapter(folder: Path, group: str, case: str) -> None:
    one, many = found_by(folder, "none1", case), found_by(folder, group, case)
    for figures, expected in zip(many["reports"], one["reports"], strict=True):  # the norm of the gradient among them
        assert figures == pytest.approx(expected, rel=FIGURES, abs=1e-5)
    change, expected_change = (second_matrices(folder / name / case / "0001") for name in (group, "none1"))
    assert float((change - expected_change).norm() / expected_change.norm()) < CHANGE


@pytest.mark.parametrize(("group", "case"), RUNS)
def test_agents_are_isolated_and_resume_bitwise_in_every_group(folder: Path, group: str, case: str) -> None:
    found = found_by(folder, group, case)
    assert (found["isolated"], found["resumed"], found["saved_by_path"]) == (True, True, True)


@pytest.mark.parametrize(("group", "case"), SHARDED)
def test_a_sharded_process_holds_a_part_of_every_tensor(folder: Path, group: str, case: str) -> None:
    whole, found = found_by(folder, "none1", case), found_by(folder, group, case)
    assert "DTensor" not in whole["kinds"]
    assert found["kinds"] == ["DTensor"]
    assert found["parts"] == pytest.approx(whole["parts"] / int(group[-1]), rel=0.1)
    assert found["lora_dtypes"] == ["torch.float32"]
    assert found["base_dtype"] == ("torch.bfloat16" if case.endswith("bf16") else "torch.float32")


@pytest.mark.parametrize(("group", "case"), SHARDED)
def test_a_checkpoint_is_read_and_written_alike_with_and_without_sharding(folder: Path, group: str, case: str) -> None:
    """The sharded group read a checkpoint of a process that holds the whole model, and wrote it again."""
    whole, again = folder / "from_none1" / case, folder / group / case / "0002"
    for file in ("learner/lora.safetensors", "adapter_model.safetensors"):
        ours, theirs = load_file(whole / file), load_file(again / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    moments, theirs = (torch.load(at / "learner" / "optimizer.pt", weights_only=True)["state"] for at in (whole, again))
    assert moments.keys() == theirs.keys()
    for index, slot in moments.items():
        assert all(torch.equal(slot[key], theirs[index][key]) for key in slot)
    scored, expected = found_by(folder, group, case)["read_from_whole"], found_by(folder, "none1", case)["logprobs"]
    for row, expected_row in zip(scored, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


def test_packed_weights_are_not_sharded() -> None:
    with pytest.raises(SettingError, match=r"learner.sharding is 'fsdp2'; it must be none with learner.quantization"):
        LearnerProcessSettings(quantization="nf4", sharding="fsdp2")
    with pytest.raises(SettingError, match="one of none, fsdp2"):
        LearnerProcessSettings(sharding="zero3")
