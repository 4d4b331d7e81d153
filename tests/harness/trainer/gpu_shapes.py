"""What the GPU benchmark computes with: model shapes, rows, the operations of a LoRA step, peak rates of GPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from ratchet.trainer.learner import lora
from ratchet.trainer.rows.token_row import TokenRow
from tests.harness.trainer.tiny import build_tokenizer

TOP_LOGIT = 25.0  # of real models; random weights have about 3.5
MEMBERS = 8  # of a group
_TRAINED = 0.25  # of the tokens
_TURN = 120  # trained tokens of an answer

# Dense bf16 with fp32 accumulation, operations per second, from the vendors' data sheets.
# Part of the name that torch reports, the most specific first.
_PEAKS = (
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("RTX 6000 Ada", 364e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX A6000", 155e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)

_QWEN2: dict[str, dict[str, Any]] = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": False},
}  # fmt: skip
_EXPERTS: dict[str, dict[str, Any]] = {
    "30b-a3b": {"hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 6,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
                "num_experts_per_tok": 8, "vocab_size": 151936},
    "tiny-moe": {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
                 "num_experts_per_tok": 2, "vocab_size": 512},
}  # fmt: skip


def config_of(shape: str) -> PreTrainedConfig:
    """Return the configuration of Qwen2.5-7B or 1.5B, SmolLM2-135M, six layers of Qwen3-30B-A3B, or a tiny model."""
    positions = {"max_position_embeddings": 32768, "use_cache": True}
    if shape in _EXPERTS:
        return Qwen3MoeConfig(**_EXPERTS[shape], **positions, tie_word_embeddings=False, norm_topk_prob=True)
    if shape == "smollm2":
        return LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            vocab_size=49152, tie_word_embeddings=True, rope_theta=1e5, **positions,
        )  # fmt: skip
    return Qwen2Config(**_QWEN2[shape], **positions, rope_theta=1e6)


def build_model(shape: str, device: torch.device, *, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Return a model with random weights, made on the device."""
    torch.manual_seed(0)
    config = config_of(shape)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@torch.no_grad()
def scale_logits(model: Any) -> Any:
    """Scale the last norm so that the largest logit of a position is about that of a real model; return the model.

    bf16 resolves a logit to 1/256 of its size, so the rounding of logprobs follows from it.
    """
    device = model.device
    ids = torch.randint(0, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(1)).to(device)
    top = model(input_ids=ids).logits.float().amax(-1).mean()
    model.get_decoder().norm.weight.mul_(TOP_LOGIT / top)
    return model


@contextmanager
def model_in_memory(model: Any) -> Iterator[None]:
    """Let the learner train a model made here in place of one read from files."""
    load = lora.load
    lora.load = lambda *_, **__: (model, build_tokenizer())
    try:
        yield
    finally:
        lora.load = load


def group_rows(vocabulary: int, tokens: int, max_length: int, seed: int = 0) -> list[TokenRow]:
    """Return rows of about that many tokens in groups of eight; median length a fifth of the max_length."""
    dice = random.Random(seed)
    rows: list[TokenRow] = []
    smallest = max(8, max_length // 32)
    while sum(len(row.ids) for row in rows) < tokens:
        median = max_length / 5 * math.exp(dice.gauss(0, 0.5))  # of the group
        prompt = [dice.randrange(3, vocabulary) for _ in range(min(max_length // 2, max(4, int(median * 0.4))))]
        for member in range(MEMBERS):
            length = int(min(max_length, max(smallest, len(prompt) + 4, median * math.exp(dice.gauss(0, 0.6)))))
            ids = (*prompt, *(dice.randrange(3, vocabulary) for _ in range(length - len(prompt))))
            turn = min(_TURN, max(2, max_length // 16))
            mask = [0] * len(prompt) + [0] * (length - len(prompt))
            wanted, place = max(1, int(_TRAINED * length)), len(prompt)
            gap = max(1, (length - len(prompt) - wanted) // max(1, wanted // turn))
            while wanted > 0 and place < length:
                end = min(length, place + min(turn, wanted))
                mask[place:end] = [1] * (end - place)
                wanted, place = wanted - (end - place), end + gap
            rows.append(TokenRow(f"t{len(rows)}", ids, tuple(mask), (-1.0,) * length, 1.0 - 2 * (member % 2)))
    return rows


def step_flops(config: Any, lengths: Sequence[int], trained: int) -> tuple[float, float]:
    """Return the operations of a LoRA step that MFU counts: of linear layers, and of attention.

    Linear: 4 N for each token, 2 N forward and 2 N for the gradient of the activations, because frozen weights have
    none; N are the weights of a layer's linear layers that a token meets, and of the LM head for trained tokens only.
    Attention: 6 L^2 heads head_dim a layer for a causal row of L tokens, forward and backward. What is recomputed is
    not counted, nor is the adapter (about 1%).
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    projections = 2 * hidden * heads * head_dim + 2 * hidden * config.num_key_value_heads * head_dim
    if getattr(config, "num_experts", None):
        mlp = 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok + hidden * config.num_experts
    else:
        mlp = 3 * hidden * config.intermediate_size
    linear = 4.0 * (layers * (projections + mlp) * sum(lengths) + hidden * config.vocab_size * trained)
    return linear, 6.0 * sum(length**2 for length in lengths) * heads * head_dim * layers


def peak_flops(name: str) -> float | None:
    """Return the peak of a device by its name; None if it is not listed."""
    return next((peak for part, peak in _PEAKS if part in name), None)
