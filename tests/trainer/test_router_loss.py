"""A mixture of experts: the loss that balances its router is a mean over a step, however many micro-batches it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import VOCABULARY, build_row, build_tokenizer


def build_experts(folder: Path, coefficient: float) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, output_router_logits=True, router_aux_loss_coef=coefficient,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_the_routers_loss_does_not_grow_with_the_number_of_micro_batches(tmp_path: Path) -> None:
    base = build_experts(tmp_path / "experts", coefficient=1.0)
    rows = [build_row(3, advantage=1e-6)] * 8  # equal rows: every micro-batch is as well balanced as all together

    def trained(token_budget: int) -> RoundReport:
        settings = LearnerSettings(
            target_modules=["q_proj", "v_proj", "gate"], token_budget=token_budget, max_grad_norm=0.0, threads=1
        )
        return Learner(str(base), settings).train_round(rows)

    together, apart = trained(8192), trained(1)
    assert together.loss > 0.5  # the router's part is there, and large
    assert apart.loss == pytest.approx(together.loss, rel=1e-4)
    assert apart.grad_norm == pytest.approx(together.grad_norm, rel=1e-3)
