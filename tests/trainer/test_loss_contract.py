"""Claims about the loss: it equals a hand-written reference, unpadded and one row at a time, in fp32.

This is the contract with the pinned TRL: if a new version fails here, its loss changed. Every case starts from an
adapter that is not zero, ragged groups, several turns a row, mixed temperatures and a sampler that is off, and moves
the adapter between the recomputation of the round's first policy and the loss, so that ratios are clipped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny import build_row
from trainer import loss
from trainer.advantage import group_advantages
from trainer.learner_settings import LearnerSettings
from trainer.tokens import TokenRow

GROUP_SIZES = (4, 3, 2)
WORST_RELATIVE_ERROR = 2e-5

CASES = [
    pytest.param(LearnerSettings(loss="dapo"), id="dapo"),
    pytest.param(LearnerSettings(loss="dapo", kl=0.05), id="dapo-kl"),
    pytest.param(LearnerSettings(loss="dapo", truncate_importance_at=None), id="dapo-uncorrected"),
    pytest.param(LearnerSettings(loss="cispo", epsilon_high=1.1), id="cispo"),
    pytest.param(LearnerSettings(loss="cispo", epsilon_high=5.0, kl=0.05), id="cispo-kl"),
    pytest.param(LearnerSettings(loss="cispo", epsilon_high=5.0, truncate_importance_at=None), id="cispo-uncorrected"),
    pytest.param(LearnerSettings(loss="grpo"), id="grpo"),
    pytest.param(LearnerSettings(loss="grpo", truncate_importance_at=None), id="grpo-uncorrected"),
    pytest.param(LearnerSettings(loss="dapo", gradient_checkpointing=True), id="dapo-checkpointed"),
]


@dataclass(frozen=True, slots=True)
class Computed:
    """A loss, and its gradient for every LoRA parameter."""

    loss: float
    gradient: dict[str, torch.Tensor]

    def relative_error(self, other: Computed) -> float:
        """The larger of the relative errors of gradient and loss."""
        gap = math.sqrt(sum(float((self.gradient[n] - g).pow(2).sum()) for n, g in other.gradient.items()))
        size = math.sqrt(sum(float(g.pow(2).sum()) for g in other.gradient.values()))
        return max(gap / size, abs(self.loss - other.loss) / max(abs(other.loss), 1e-3))


@pytest.mark.parametrize("settings", CASES)
def test_loss_and_gradient_equal_the_hand_written_reference(
    settings: LearnerSettings, tiny_model: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(settings, tiny_model, tmp_path)
    rows = build_groups(trainer)
    old = [reference_logprobs(trainer.model, row).detach() for row in rows]
    micros = trainer.prepare(rows)
    assert len(micros) > 2, "the case must span several micro-batches"
    disturb(trainer, scale=0.03, seed=2)
    ours = sum_over_micros(trainer, micros)
    error = ours.relative_error(reference_loss(trainer, rows, old, settings))
    assert error < WORST_RELATIVE_ERROR


def test_masked_tokens_get_exactly_zero_gradient_and_trained_ones_do_not(tiny_model: Path, tmp_path: Path) -> None:
    trainer = build_trainer(LearnerSettings(), tiny_model, tmp_path)
    micros = trainer.prepare(build_groups(trainer))
    captured: list[torch.Tensor] = []

    def keep_gradient(module: Any, inputs: Any, output: Any) -> None:
        output.log_probs.retain_grad()
        captured.append(output.log_probs)

    handle = trainer.model.register_forward_hook(keep_gradient)
    sum_over_micros(trainer, micros)
    handle.remove()
    for log_probs, micro in zip(captured, micros, strict=True):
        assert log_probs.grad is not None
        assert not log_probs.grad[micro["tool_mask"] == 0].any()
        assert log_probs.grad[micro["tool_mask"] == 1].all()


def test_the_size_of_micro_batches_does_not_change_the_gradient(tiny_model: Path, tmp_path: Path) -> None:
    results = []
    for budget in (1, 10_000):
        trainer = build_trainer(LearnerSettings(), tiny_model, tmp_path, budget=budget)
        rows = build_groups(trainer)
        results.append(sum_over_micros(trainer, trainer.prepare(rows)))
    error = results[0].relative_error(results[1])
    assert error < WORST_RELATIVE_ERROR


def build_trainer(
    settings: LearnerSettings, model: Path, folder: Path, *, budget: int = 160
) -> loss.RecordedGRPOTrainer:
    """A trainer whose LoRA B is not zero: at zero, half of the gradient would vanish and hide errors."""
    trainer = loss.build(str(model), replace(settings, token_budget=budget), folder)
    disturb(trainer, scale=0.05, seed=1)
    return trainer


def disturb(trainer: loss.RecordedGRPOTrainer, *, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.lora_parameters().items():
            if "lora_B" in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def build_groups(trainer: loss.RecordedGRPOTrainer) -> list[TokenRow]:
    """Ragged groups sampled by a policy near the trainer's; some rows uncorrected, some with an advantage a token."""
    dice, rows = random.Random(0), []
    for group, size in enumerate(GROUP_SIZES):
        for member, advantage in enumerate(group_advantages([dice.random() for _ in range(size)])):
            row = build_row(10 * group + member, advantage=advantage, temperature=dice.choice([1.0, 0.7, 1.3]))
            true = [0.0, *reference_logprobs(trainer.model, row).tolist()]
            sampled = [min(lp + dice.gauss(0, 0.5), 0.0) if m else 0.0 for lp, m in zip(true, row.mask, strict=True)]
            rows.append(replace(row, logprobs=tuple(sampled), importance=member != 1))
    rows[0] = replace(rows[0], advantages=tuple(dice.gauss(0, 1) for _ in rows[0].ids))
    return rows


def sum_over_micros(trainer: loss.RecordedGRPOTrainer, micros: Sequence[loss.Micro]) -> Computed:
    trainer.model.zero_grad()
    total = 0.0
    for micro in micros:
        part = trainer.compute_loss(trainer.model, micro)
        part.backward()
        total += float(part.detach())
    return Computed(total, gradients(trainer))


def gradients(trainer: loss.RecordedGRPOTrainer) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in trainer.lora_parameters().items() if p.grad is not None}


def reference_logprobs(model: Any, row: TokenRow) -> torch.Tensor:
    """Logprobs of all tokens after the first, (T - 1,), from the model's own logits."""
    ids = torch.tensor([row.ids])  # (1, T)
    logits = model(ids).logits[0, :-1].float() / row.temperature  # (T - 1, V)
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def reference_loss(
    trainer: loss.RecordedGRPOTrainer, rows: Sequence[TokenRow], old: Sequence[torch.Tensor], settings: LearnerSettings
) -> Computed:
    """The loss as the papers write it, over the rows of one optimiser step."""
    trainer.model.zero_grad()
    n_trained = sum(row.tokens_trained for row in rows)
    terms = []
    for row, old_row in zip(rows, old, strict=True):
        mask = torch.tensor(row.mask[1:], dtype=torch.float32)  # (T - 1,)
        token_loss = reference_token_loss(trainer.model, row, old_row, settings) * mask
        share = n_trained if settings.loss != "grpo" else float(mask.sum()) * len(rows)
        terms.append(token_loss.sum() / share)
    total = torch.stack(terms).sum()
    total.backward()
    return Computed(float(total.detach()), gradients(trainer))


def reference_token_loss(model: Any, row: TokenRow, old: torch.Tensor, settings: LearnerSettings) -> torch.Tensor:
    new = reference_logprobs(model, row)  # (T - 1,)
    advantage = torch.tensor(row.advantages[1:]) if row.advantages else row.advantage
    weight = torch.ones_like(new)
    if settings.truncate_importance_at is not None and row.importance:
        weight = (old - torch.tensor(row.logprobs[1:])).exp().clamp(max=settings.truncate_importance_at)
    ratio = (new - old).exp()
    if settings.loss == "cispo":
        token_loss = -ratio.clamp(max=settings.epsilon_high).detach() * advantage * new
    else:
        clipped = ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
        token_loss = -torch.min(ratio * advantage, clipped * advantage)
    token_loss = token_loss * weight
    if settings.kl:
        with torch.no_grad(), model.disable_adapter():
            base = reference_logprobs(model, row)
        token_loss = token_loss + settings.kl * ratio * ((base - new).exp() - (base - new) - 1)
    return token_loss
