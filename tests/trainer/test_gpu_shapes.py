"""The GPU benchmark counts the operations that it says it counts, and its rows are those of a real round."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.trainer.gpu_shapes import build_model, group_rows, peak_flops, step_flops

CPU = torch.device("cpu")


def test_mfu_counts_the_forward_pass_and_the_gradient_of_the_activations() -> None:
    rows, length = 2, 64
    model = build_model("tiny", CPU, dtype=torch.float32).requires_grad_(False)
    embedded = torch.randn(rows, length, model.config.hidden_size, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        model(inputs_embeds=embedded).logits.sum().backward()
    products = counter.get_flop_counts()["Global"]
    linear = sum(count for operator, count in products.items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    counted, attention = step_flops(model.config, [length] * rows, trained=rows * length)
    assert counted == linear
    # One causal row: two products of L x L / 2 x hidden forward, four backward; 2 operations each.
    assert attention == 6 * 2 * (length**2 / 2) * 64 * rows * 2


def test_a_token_meets_only_the_experts_that_it_is_routed_to() -> None:
    config = build_model("tiny-moe", CPU, dtype=torch.float32).config
    linear, _ = step_flops(config, [1], trained=0)
    attention = 2 * 64 * 64 + 2 * 64 * 32
    assert linear == 4 * 2 * (attention + 2 * 3 * 64 * 32 + 64 * 4)


def test_peaks_are_found_by_the_name_that_torch_reports() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L40") != peak_flops("NVIDIA L4")
    assert peak_flops("unknown") is None


def test_rows_of_a_group_share_a_prompt_and_a_quarter_of_their_tokens_is_trained() -> None:
    rows = group_rows(1000, 60_000, 16_384)
    assert 60_000 <= sum(len(row.ids) for row in rows) < 180_000
    assert max(len(row.ids) for row in rows) <= 16_384
    assert 0.18 < sum(row.tokens_trained for row in rows) / sum(len(row.ids) for row in rows) < 0.27
    first = rows[:8]
    shared = next(place for place in range(min(len(r.ids) for r in first)) if len({r.ids[place] for r in first}) > 1)
    assert shared >= 4
    assert all(not any(row.mask[:shared]) for row in first)
