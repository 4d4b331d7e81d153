"""Shared prefixes: a round on one group, with what its rows share computed once and with each row by itself.

    python -m benchmarks.shared_prefixes [--wide]

One group of eight, a shared prompt, answers of half to one and a half times the mean, one optimiser step, one thread;
CPU seconds of the process, the least of three in turns. `chosen` is what the learner does by itself, `always` puts the
group together whatever it costs. Tiny: 128 wide, 4 layers; wide: 1,024 wide, 2 layers (Qwen3-0.6B's); random weights.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.training import cpu_seconds
from ratchet.trainer.learner import lora
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import VOCABULARY, build_tokenizer

TINY_SHAPES = ((500, 50), (500, 150), (500, 500), (1000, 150), (1000, 500), (2000, 150), (2000, 500))
WIDE_SHAPES = ((500, 150), (500, 500), (1000, 150))
SETTINGS = LearnerSettings(threads=1, token_budget=8192, sequence_mask_threshold=None)
WHATEVER_IT_COSTS = 1e12


def build(folder: Path, *, wide: bool) -> Path:
    """A random model."""
    tokenizer = build_tokenizer()
    size = (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 64}
        if wide
        else {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 32}
    )  # fmt: skip
    config = Qwen3Config(
        vocab_size=VOCABULARY, max_position_embeddings=8192, pad_token_id=tokenizer.pad_token_id, **size
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def group(prompt: int, answer: int, size: int = 8) -> list[TokenRow]:
    """Rows of one prompt."""
    dice = random.Random(prompt + answer)
    shared = [dice.randrange(3, VOCABULARY) for _ in range(prompt)]
    rows = []
    for member in range(size):
        own = [dice.randrange(3, VOCABULARY) for _ in range(round(answer * dice.uniform(0.5, 1.5)))]
        mask, logprobs = (0,) * prompt + (1,) * len(own), (0.0,) * prompt + (-6.2,) * len(own)
        rows.append(TokenRow(f"t{member}", (*shared, *own), mask, logprobs, dice.gauss(0, 1)))
    return rows


def round_on(trainer: RecordedGRPOTrainer, worth: float | None, rows: list[TokenRow]) -> None:
    """One round, without its step."""
    trainer._attention_pairs_per_token = worth
    trainer.backward(trainer.prepare(rows, only_step=True))
    trainer.model.zero_grad()


def measure(*, wide: bool) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = build(Path(name) / "model", wide=wide)
        trainer = lora.build(str(folder), replace(SETTINGS, learning_rate=1e-4))
        ways = {"apart": None, "chosen": trainer._attention_pairs_per_token, "always": WHATEVER_IT_COSTS}
        print(f"| {'wide' if wide else 'tiny'}: prompt, answer | tokens fewer | apart | chosen | always |")
        print("|---|---|---|---|---|")
        for prompt, answer in WIDE_SHAPES if wide else TINY_SHAPES:
            rows = group(prompt, answer)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(3):
                for way, worth in ways.items():
                    times[way].append(cpu_seconds(partial(round_on, trainer, worth, rows)))
            least = {way: min(seconds) for way, seconds in times.items()}
            whole = sum(len(row.ids) for row in rows)
            result = " | ".join(f"{seconds:.2f} s, {least['apart'] / seconds:.2f}" for seconds in least.values())
            print(f"| {prompt}, {answer} | {whole / (whole - 7 * prompt):.2f} | {result} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--wide", action="store_true", help="the wide model")
    measure(wide=parser.parse_args().wide)


if __name__ == "__main__":
    main()
