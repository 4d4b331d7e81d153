"""Writes a model folder: python -m benchmarks.gpu.make_model FOLDER SHAPE [DEVICE]

A shape of the benchmark with random bf16 weights, the logits of a real model, and the tests' tokenizer; beside it, in
FOLDER-adapters, two adapters of it for `benchmarks.gpu.served_load`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.gpu.precision import adapted
from tests.harness.trainer.gpu_shapes import build_model, scale_logits
from tests.harness.trainer.tiny import build_tokenizer


def main() -> None:
    folder, shape = Path(sys.argv[1]), sys.argv[2]
    device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cuda")
    tokenizer = build_tokenizer()
    model = scale_logits(build_model(shape, device, dtype=torch.bfloat16))
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:,.0f}M parameters")
    policy = adapted(model)  # changes nothing yet, which costs as much to serve
    for name in ("one", "two"):
        policy.save_pretrained(folder.with_name(f"{folder.name}-adapters") / name)


if __name__ == "__main__":
    main()
