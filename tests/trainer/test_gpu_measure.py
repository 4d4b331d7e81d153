"""The GPU benchmark answers every question on a CPU too, and counts the operations that it says it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import measure, speed
from benchmarks.gpu.shapes import build_model, peak_flops, step_flops

ROOT = Path(__file__).parents[2]
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
    rows = speed.group_rows(1000, 60_000, 16_384)
    assert 60_000 <= sum(len(row.ids) for row in rows) < 180_000
    assert max(len(row.ids) for row in rows) <= 16_384
    assert 0.18 < sum(row.tokens_trained for row in rows) / sum(len(row.ids) for row in rows) < 0.27
    first = rows[:8]
    shared = next(place for place in range(min(len(r.ids) for r in first)) if len({r.ids[place] for r in first}) > 1)
    assert shared >= 4
    assert all(not any(row.mask[:shared]) for row in first)


@pytest.mark.parametrize("question", measure.SECONDS)
def test_every_question_is_answered_on_a_cpu(question: str) -> None:
    figures = list(measure.questions("tiny", None)[question](CPU))
    expected = {"noise": 1 + 6 + 3 * 6, "moves": 12, "head": 2, "step": 4, "trl": 2, "beside": 4, "experts": 2}
    assert len(figures) == expected[question]
    missing = [row.get("case") for row in figures if "missing" in row]
    assert missing == (["no memory"] if question == "beside" else [])


def test_a_question_that_fails_loses_no_other(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.measure", "noise", "head", "--shape", "tiny", "--device", "cpu"]
    command += ["--model", "no-such-shape", "--out", str(out), "--seconds", "100"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert "no complete answer: noise (exit code 1)" in done.stderr
    assert [json.loads(line)["question"] for line in out.read_text().splitlines()] == ["head", "head"]
