"""Tiny random base models of several architectures, dense and mixture of experts, made in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.trainer.tiny import VOCABULARY, build_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False,
    },
    "gemma": {"tie_word_embeddings": True},
}  # fmt: skip


def build_shape(name: str, folder: Path) -> Path:
    """Write a tiny model of an architecture with its tokenizer into `folder` and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(name, **(_COMMON | ids | SHAPES[name]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
