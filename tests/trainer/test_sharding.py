"""Sharded models: one, two and four processes; checkpointing and the fused LM head (FSDP2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import gpu_memory, lora, process_group
from ratchet.trainer.learner.agent_state import fill, part, whole
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.trainer.model_shapes import SHAPES, build_shape
from tests.harness.trainer.sharded_learners import LAYOUTS
from tests.harness.trainer.tiny import VOCABULARY, build_rows
from tests.trainer.test_memory import LAYERS, Operators, tiles

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


@pytest.mark.slow
@pytest.mark.parametrize(("group", "case"), [run for run in RUNS if run[0] != "none1"])
def test_any_number_of_processes_and_any_sharding_train_the_same_adapter(folder: Path, group: str, case: str) -> None:
    one, many = found_by(folder, "none1", case), found_by(folder, group, case)
    for figures, expected in zip(many["reports"], one["reports"], strict=True):  # the norm of the gradient among them
        assert figures == pytest.approx(expected, rel=FIGURES, abs=1e-5)
    change, expected_change = (second_matrices(folder / name / case / "0001") for name in (group, "none1"))
    assert float((change - expected_change).norm() / expected_change.norm()) < CHANGE


@pytest.mark.slow
@pytest.mark.parametrize(("group", "case"), RUNS)
def test_agents_are_isolated_and_resume_bitwise_in_every_group(folder: Path, group: str, case: str) -> None:
    found = found_by(folder, group, case)
    assert (found["isolated"], found["resumed"], found["saved_by_path"]) == (True, True, True)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "case"), SHARDED)
def test_a_sharded_process_holds_a_part_of_every_tensor(folder: Path, group: str, case: str) -> None:
    whole, found = found_by(folder, "none1", case), found_by(folder, group, case)
    assert "DTensor" not in whole["kinds"]
    assert found["kinds"] == ["DTensor"]
    assert found["parts"] == pytest.approx(whole["parts"] / int(group[-1]), rel=0.1)
    assert found["lora_dtypes"] == ["torch.float32"]
    assert found["base_dtype"] == ("torch.bfloat16" if case.endswith("bf16") else "torch.float32")


@pytest.mark.slow
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


@pytest.mark.slow
def test_packed_weights_are_not_sharded() -> None:
    with pytest.raises(SettingError, match=r"learner.sharding is 'fsdp2'; it must be none with learner.quantization"):
        LearnerProcessSettings(quantization="nf4", sharding="fsdp2")
    with pytest.raises(SettingError, match="one of none, fsdp2"):
        LearnerProcessSettings(sharding="zero3")


SETTINGS = LearnerSettings(max_grad_norm=0.0, token_budget=10_000, gradient_checkpointing=False, threads=1)
Gradients = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    """The process group of a sharded model in one process."""
    process_group.join(alone=True)
    yield
    torch.distributed.destroy_process_group()


def build(settings: LearnerSettings, model: Path, folder: Path, sharding: str = "fsdp2") -> RecordedGRPOTrainer:
    """A trainer whose adapter is not zero, the same with any sharding."""
    trainer = lora.build(str(model), settings, sharding)
    parameters, generator = trainer.lora_parameters(), torch.Generator().manual_seed(1)
    weights = {name: 0.05 * torch.randn(parameters[name].shape, generator=generator) for name in sorted(parameters)}
    fill(trainer, {name: part(weights[name], parameter) for name, parameter in parameters.items()})
    return trainer


def step(trainer: RecordedGRPOTrainer, rows: Sequence[TokenRow]) -> tuple[Gradients, Operators]:
    """The gradients of a step, and the operators that it ran."""
    (micro,) = trainer.prepare(rows, only_step=True)
    trainer.model.zero_grad()
    with Operators() as counted:
        trainer.backward([micro])
    gradients = {name: p.grad for name, p in trainer.lora_parameters().items() if p.grad is not None}
    return {name: whole(gradient) for name, gradient in gradients.items()}, counted


def assert_same(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert float((gradient - theirs[name]).norm()) <= 1e-5 * float(theirs[name].norm())


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_checkpointed_layers_of_a_sharded_model_give_the_gradient_of_the_whole_one(
    offload: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "_LEAST_OFFLOADED", 100)
    expected, direct = step(build(SETTINGS, tiny_model, tmp_path, "none"), build_rows(4))
    settings = replace(SETTINGS, gradient_checkpointing=True, activation_offload=offload)
    trainer = build(settings, tiny_model, tmp_path)
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    ours, recomputed = step(trainer, build_rows(4))
    assert_same(ours, expected)
    assert recomputed.calls["silu"] == 2 * direct.calls["silu"]
    assert recomputed.attention == (2 if offload else 1) * LAYERS


@pytest.mark.slow
def test_auto_measures_the_activations_of_a_sharded_layer_without_its_gathered_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "checkpoints", lambda setting: True)
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda: 0)
    measured = []
    for sharding in ("none", "fsdp2"):
        trainer = build(replace(SETTINGS, gradient_checkpointing="auto"), tiny_model, tmp_path, sharding)
        step(trainer, build_rows(4))
        measured.append(trainer._pass._memory._bytes_per_token)
    assert measured[1] == pytest.approx(measured[0], rel=0.02)


@pytest.mark.slow
def test_the_head_of_a_sharded_model_never_makes_the_whole_logits_and_shards_itself_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows = [TokenRow(f"t{n}", tuple(range(n, n + 40)), (0, *(1,) * 39), (-6.2,) * 40, n - 12.0) for n in range(24)]
    expected = build(SETTINGS, tiny_model, tmp_path, "none").score(rows)
    trainer = build(SETTINGS, tiny_model, tmp_path)
    gathered = 2 * VOCABULARY * 64  # the embedding or the head, whole, beside its copy
    with tiles(16, 64), Operators() as tiled:
        scores = trainer.score(rows)
    assert tiled.largest <= max(gathered, len(rows) * 40 * 2 * 64) < len(rows) * 39 * VOCABULARY
    for ours, theirs in zip(scores, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
