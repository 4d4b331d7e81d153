"""Truncated sampling on the real vLLM: its logprobs are those of the learner over the tokens that are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.settings.project_settings import Settings
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.e2e.conftest import POLICY
from tests.harness.vllm.engine import VllmServerProcess

pytestmark = pytest.mark.e2e

TEMPERATURE = 1.3
TRUNCATIONS = ((0, 0.7, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.1), (40, 0.9, 0.02), (3, 0.5, 0.0))


def sampled(url: str, model: str, prompt: list[int], seed: int, truncation: tuple[int, float, float]) -> TokenRow:
    top_k, top_p, min_p = truncation
    body: dict[str, Any] = {
        "model": model, "prompt": prompt, "max_tokens": 24, "temperature": TEMPERATURE, "seed": seed, "logprobs": 0,
        "return_token_ids": True, "top_k": top_k, "top_p": top_p, "min_p": min_p,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()["choices"][0]
    ids, logprobs = answer["token_ids"], answer["logprobs"]["token_logprobs"]
    return TokenRow(
        f"t{seed}", (*prompt, *ids), (0,) * len(prompt) + (1,) * len(ids), (0.0,) * len(prompt) + tuple(logprobs),
        float(seed % 2), TEMPERATURE, truncation=truncation,
    )  # fmt: skip


def test_vllms_logprobs_are_the_learners_over_the_tokens_that_are_left(tmp_path: Path) -> None:
    from ratchet.trainer.learner import lora

    settings = {"base_model": str(POLICY), "model": "mail", "vllm": {"max_model_len": 256, "dtype": "float32"}}
    server = VllmServerProcess(Settings.of(settings), tmp_path / "vllm.log", adapters=False)
    try:
        server.wait()
        name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        prompts = [[5 + seed, 17, 40, 9 + seed, 33, 21] for seed in range(4)]
        rows = [
            sampled(server.url, name, prompt, 10 * place + seed, truncation)
            for place, truncation in enumerate(TRUNCATIONS)
            for seed, prompt in enumerate(prompts)
        ]
    finally:
        server.kill()
    trainer = lora.build(str(POLICY), LearnerSettings(dtype="float32", threads=1))
    found = trainer.mismatch(trainer.prepare(rows))
    assert found.tokens == sum(row.tokens_trained for row in rows) > 200
    assert found.largest < 1e-3
    assert found.total / found.tokens < 1e-5
