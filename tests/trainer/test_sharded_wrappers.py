"""Activation checkpointing and the fused LM head on a model that is sharded (FSDP2), in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ratchet.trainer.learner import gpu_memory, lora, process_group
from ratchet.trainer.learner.agent_state import fill, part, whole
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import VOCABULARY, build_rows
from tests.trainer.test_activation_memory import LAYERS, Operators, tiles

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
