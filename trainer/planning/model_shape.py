"""The shape of a causal language model, read from the content of its config.json.

Covers the families whose layers the formulas of this package know: Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE,
Gemma 2, Gemma 3 (with its vision tower) and gpt-oss. Missing keys have the defaults of the model's own configuration
class. Sources: `configuration_*.py` and `modeling_*.py` of transformers 5; tests compare both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.trainer.errors import ModelShapeUnknown


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of the sparse layers."""

    count: int
    per_token: int
    intermediate: int
    sparse_layers: int
    bias: bool = False  # of the router and of each expert


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A SigLIP tower with Gemma 3's projector; the learner does not train it."""

    hidden: int
    intermediate: int
    layers: int
    patch: int
    image: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal language model; counts are of elements, not of bytes."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_positions: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    norms_per_layer: int = 2
    experts: Experts | None = None
    vision: VisionTower | None = None
    sliding_layers: int = 0
    window: int = 0
    weight_format: str | None = None  # how its files are quantized: mxfp4, fp8; None: not at all

    @property
    def query(self) -> int:
        """Width of the queries, and of the attention's output."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.layers - (self.experts.sparse_layers if self.experts else 0)


# Defaults of the configuration classes, where they differ from a plain Llama's.
_GEMMA = {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_GEMMA |= {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_local_experts": 8,
                "num_experts_per_tok": 2},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "vocab_size": 151936},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128, "vocab_size": 151936},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "vocab_size": 151936,
                  "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "gemma2": _GEMMA | {"vocab_size": 256000, "max_position_embeddings": 8192},
    "gemma3_text": _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "num_local_experts": 128,
                "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072},
}  # fmt: skip
FAMILIES = tuple(_DEFAULTS)
# One layer in so many attends to everything; the others to a window.
_FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
_OTHER_NAMES = {"num_experts": "num_local_experts"}
_FORMATS = ("mxfp4", "fp8")


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model that a config.json describes. Raises ModelShapeUnknown."""
    text = config.get("text_config")
    own: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    family = str(own.get("model_type") or config.get("model_type"))
    if family not in _DEFAULTS:
        named = "a config.json without a model_type" if family == "None" else f"model_type {family!r}"
        raise ModelShapeUnknown(
            f"no memory formula for {named}: there is one for {', '.join(FAMILIES)}. Start it with "
            "settings of your own: vllm.gpu_memory_utilization, learner.token_budget, learner.max_length"
        )
    values = _DEFAULTS[family] | {_OTHER_NAMES.get(key, key): value for key, value in own.items() if value is not None}
    try:
        return _shape(family, values, config)
    except KeyError as missing:
        raise ModelShapeUnknown(
            f"the config.json has no {missing.args[0]!r}: it is not the complete configuration of a {family} model"
        ) from missing


def _shape(family: str, values: Mapping[str, Any], config: Mapping[str, Any]) -> ModelShape:
    hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    sliding = _sliding_layers(family, values)
    biased = bool(values.get("attention_bias"))
    return ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or hidden // heads,
        intermediate=values["intermediate_size"],
        vocab=values["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", values.get("tie_word_embeddings", False))),
        max_positions=values["max_position_embeddings"],
        qkv_bias=biased or family == "qwen2",
        o_bias=biased,
        mlp_bias=bool(values.get("mlp_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        sinks=family == "gpt_oss",
        norms_per_layer=4 if family.startswith("gemma") else 2,
        experts=_experts(family, values),
        vision=_vision(config.get("vision_config")),
        sliding_layers=sliding,
        window=int(values.get("sliding_window") or 0) if sliding else 0,
        weight_format=_weight_format(config),
    )


def extends_context(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json extends the context beyond its max_position_embeddings (YaRN and others)."""
    text = config.get("text_config")
    own: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    ropes = [own.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    by_layer = [inner for rope in ropes for inner in rope.values() if isinstance(inner, Mapping)]
    return any("factor" in rope for rope in (*ropes, *by_layer))


def _experts(family: str, values: Mapping[str, Any]) -> Experts | None:
    if family not in ("qwen3_moe", "mixtral", "gpt_oss"):
        return None
    count = values["num_local_experts"]
    layers, dense = values["num_hidden_layers"], set(values.get("mlp_only_layers") or ())
    step = values.get("decoder_sparse_step", 1)
    return Experts(
        count=count,
        per_token=values["num_experts_per_tok"],
        intermediate=values["moe_intermediate_size"] if family == "qwen3_moe" else values["intermediate_size"],
        sparse_layers=sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        bias=family == "gpt_oss",
    )


def _vision(vision: Any) -> VisionTower | None:
    if not isinstance(vision, Mapping):
        return None
    return VisionTower(
        hidden=vision.get("hidden_size", 768),
        intermediate=vision.get("intermediate_size", 3072),
        layers=vision.get("num_hidden_layers", 12),
        patch=vision.get("patch_size", 16),
        image=vision.get("image_size", 224),
    )


def _sliding_layers(family: str, values: Mapping[str, Any]) -> int:
    kinds, layers = values.get("layer_types"), values["num_hidden_layers"]
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    every = values.get("sliding_window_pattern") or _FULL_ATTENTION_EVERY.get(family)
    if every:
        return sum((layer + 1) % every != 0 for layer in range(layers))
    if family.startswith("qwen"):
        return max(0, layers - values.get("max_window_layers", 28)) if values.get("use_sliding_window") else 0
    return int(layers) if values.get("sliding_window") else 0


def _weight_format(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    method = str(quantization.get("quant_method"))
    if method not in _FORMATS:
        raise ModelShapeUnknown(
            f"its weights are quantized by {method!r}, which cannot be trained here: name the model in bfloat16 (and "
            "set learner.quantization: nf4 to train it in four bits)"
        )
    return method
