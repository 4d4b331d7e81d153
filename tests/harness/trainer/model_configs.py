"""Configurations of transformers' models: tiny ones of each family, and real shapes. No weights."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_TINY: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_TINY_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
_GEMMA3_VISION: dict[str, Any] = {
    "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip

TINY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_TINY),
    "mistral": MistralConfig(**_TINY),
    "qwen2": Qwen2Config(**_TINY),
    "qwen3": Qwen3Config(**_TINY),
    "gemma2": Gemma2Config(**_TINY),
    "gemma3": Gemma3TextConfig(**_TINY),
    "qwen3_moe": Qwen3MoeConfig(**_TINY, **_TINY_EXPERTS, moe_intermediate_size=48),
    "mixtral": MixtralConfig(**_TINY, **_TINY_EXPERTS),
}
VARIANTS: dict[str, PretrainedConfig] = {
    "llama with biases": LlamaConfig(**_TINY, attention_bias=True, mlp_bias=True),
    "qwen3 with biases": Qwen3Config(**_TINY, attention_bias=True),
    "qwen2 with windows": Qwen2Config(**_TINY, use_sliding_window=True, sliding_window=64, max_window_layers=1),
    "qwen3_moe with dense layers": Qwen3MoeConfig(
        **_TINY, **_TINY_EXPERTS, moe_intermediate_size=48, mlp_only_layers=[1], decoder_sparse_step=2
    ),
    "gpt_oss": GptOssConfig(**_TINY, **_TINY_EXPERTS),
}
REAL: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "Qwen3-32B": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Llama-3.3-70B": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Qwen3-235B-A22B": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=1536, num_experts=128,
    ),
    "Mixtral-8x7B": MixtralConfig(),
    "gemma-2-2b": Gemma2Config(),
    "gemma-3-4b": Gemma3Config(
        text_config={
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        vision_config=_GEMMA3_VISION,
    ),
    "gpt-oss-120b": GptOssConfig(),
}  # fmt: skip
