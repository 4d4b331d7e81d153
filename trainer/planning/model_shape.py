"""The shape of a model from its files: sizes of layers, and numbers of parameters. Loads no weights and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.trainer.errors import ModelShapeUnknown

_FILE = "config.json"
_HUB_TIMEOUT = 10.0  # seconds


def read_config(model: str) -> dict[str, Any]:
    """Return the content of a model's config.json. Raises ModelShapeUnknown, with the remedy, if there is none.

    For hub names HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and HF_HOME apply.
    """
    text = _read(model, _FILE)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelShapeUnknown(f"{_FILE} of {model} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelShapeUnknown(f"{_FILE} of {model} is not the configuration of a model: it holds no JSON object")
    return content


def read_model_file(model: str, name: str, *, ask_hub: bool = True) -> str | None:
    """Return the text of a file of a model, a folder or a hub name; None if it has none, or it cannot be read.

    `ask_hub`: ask the hub, once, for a file that its local cache does not know.
    """
    try:
        return _read(model, name, ask_hub=ask_hub)
    except ModelShapeUnknown:
        return None


def _read(model: str, name: str, *, ask_hub: bool = True) -> str:
    folder = Path(model).expanduser()
    if folder.is_dir():
        file: Path | None = folder / name
        if not (folder / name).is_file():
            raise ModelShapeUnknown(f"{folder} has no {name}: name the folder that holds it, or a hub name")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelShapeUnknown(f"{model}: no such folder; name one that holds {name}, or a hub name (owner/model)")
    else:
        file = _from_cache(model, name)
    if file is None:
        return _from_hub(model, name, ask_hub=ask_hub)
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelShapeUnknown(f"{file} cannot be read: {error}") from error


def _from_cache(model: str, name: str) -> Path | None:
    """Return a file in the hub's cache; None if the cache does not know it."""
    try:
        from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ModelShapeUnknown(
            f"{model}: no such folder, and hub names need huggingface_hub: name a folder that holds {name}"
        ) from error
    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError as error:
        raise ModelShapeUnknown(f"{model}: neither a folder nor a hub name (owner/model)") from error
    if cached is _CACHED_NO_EXIST:
        raise ModelShapeUnknown(f"{model} has no {name} on the hub")
    return Path(cached) if isinstance(cached, str) else None


def _from_hub(model: str, name: str, *, ask_hub: bool) -> str:
    """Ask the hub once for a file; huggingface_hub's own download would try for half a minute."""
    import httpx
    from huggingface_hub import constants, get_token

    problem = "not in the local hub cache, and HF_HUB_OFFLINE is set"
    if ask_hub and not constants.HF_HUB_OFFLINE:
        token = get_token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        url = f"{constants.ENDPOINT}/{model}/resolve/main/{name}"
        try:
            answer = httpx.get(url, headers=headers, timeout=_HUB_TIMEOUT, follow_redirects=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
            problem = f"not in the local hub cache, and {reason}"
        else:
            if answer.status_code == httpx.codes.OK:
                return answer.text
            problem = f"without a {name} on {constants.ENDPOINT} ({answer.status_code}): check the name and HF_TOKEN"
    raise ModelShapeUnknown(f"{model}: no such folder; as a hub name it is {problem}; or name a folder with {name}")


# The shape of a causal language model, read from the content of its config.json.
#
# Covers the families whose layers the formulas of this package know: Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE,
# Gemma 2, Gemma 3 (with its vision tower) and gpt-oss. Missing keys have the defaults of the model's own configuration
# class. Sources: `configuration_*.py` and `modeling_*.py` of transformers 5; tests compare both.


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of the sparse layers."""

    count: int
    per_token: int
    intermediate: int
    sparse_layers: int
    bias: bool = False  # of the router and of each expert


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
    vision: int = 0  # parameters of the vision tower and its projector; the learner does not train them
    sliding_layers: int = 0
    window: int = 0
    weight_format: str | None = None  # how its files are quantized: mxfp4, fp8; None: not at all

    @property
    def query(self) -> int:
        """Width of the queries, and of the attention's output."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def dense_layers(self) -> int:
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
        vision=_vision_parameters(config.get("vision_config"), hidden),
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


def _vision_parameters(vision: Any, text_hidden: int) -> int:
    """Return the parameters of SigLIP's vision model without its pooling head, and of Gemma 3's projector."""
    if not isinstance(vision, Mapping):
        return 0
    hidden, inner = vision.get("hidden_size", 768), vision.get("intermediate_size", 3072)
    patch = vision.get("patch_size", 16)
    patches = (vision.get("image_size", 224) // patch) ** 2
    embeddings = hidden * 3 * patch**2 + hidden + patches * hidden
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * inner + inner + hidden
    layer = attention + mlp + 4 * hidden  # two layer norms with bias
    return int(embeddings + vision.get("num_hidden_layers", 12) * layer + 2 * hidden + hidden * text_hidden + hidden)


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


# Numbers of parameters of a model and of its LoRA adapter, exact.
#
# Base model: the layers as transformers' modelling code declares them. Adapter: Hu et al. 2021, "LoRA"
# (arXiv:2106.09685), r x (in + out) for each adapted linear layer, and for each expert of an adapted stack of experts
# (PEFT's `transformers_weight_conversion.py`).


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear layers of one name: sizes, how many there are in the model, and how many of a layer's run per token.

    `stacked` is true of experts, which are one parameter per layer. `adapters` is 2 where gate and up are fused in one
    parameter and PEFT gives each its own adapter, by twice the rank.
    """

    name: str
    inputs: int
    outputs: int
    copies: int
    bias: bool = False
    stacked: bool = False
    adapters: int = 1

    @property
    def weights(self) -> int:
        """Elements of all copies, without biases."""
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a base model by what happens to them."""

    linear: int  # weights of linear layers: quantized with nf4
    experts: int  # weights of stacked experts
    embeddings: int  # token embeddings and LM head
    other: int  # norms, biases, routers, sinks
    vision: int

    @property
    def total(self) -> int:
        return self.linear + self.experts + self.embeddings + self.other + self.vision


def linear_layers(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the linear layers of the text model by name, without LM head and router."""
    hidden, query, key_value, layers = shape.hidden, shape.query, shape.key_value, shape.layers
    found = [
        Linear("q_proj", hidden, query, layers, shape.qkv_bias),
        Linear("k_proj", hidden, key_value, layers, shape.qkv_bias),
        Linear("v_proj", hidden, key_value, layers, shape.qkv_bias),
        Linear("o_proj", query, hidden, layers, shape.o_bias),
    ]
    if dense := shape.dense_layers:
        inner = shape.intermediate
        found += [
            Linear("gate_proj", hidden, inner, dense, shape.mlp_bias),
            Linear("up_proj", hidden, inner, dense, shape.mlp_bias),
            Linear("down_proj", inner, hidden, dense, shape.mlp_bias),
        ]
    if experts := shape.experts:
        copies, inner = experts.count * experts.sparse_layers, experts.intermediate
        fused = 1 if shape.family == "gpt_oss" else 2
        found += [
            Linear("experts.gate_up_proj", hidden, 2 * inner, copies, experts.bias, stacked=True, adapters=fused),
            Linear("experts.down_proj", inner, hidden, copies, experts.bias, stacked=True),
        ]
    return tuple(found)


def count_parameters(shape: ModelShape) -> ParameterCount:
    linears = linear_layers(shape)
    biases = sum(linear.outputs * linear.copies for linear in linears if linear.bias)
    norms = (shape.norms_per_layer * shape.layers + 1) * shape.hidden
    norms += 2 * shape.head_dim * shape.layers if shape.qk_norm else 0
    sinks = shape.heads * shape.layers if shape.sinks else 0
    return ParameterCount(
        linear=sum(linear.weights for linear in linears if not linear.stacked),
        experts=sum(linear.weights for linear in linears if linear.stacked),
        embeddings=shape.vocab * shape.hidden * (1 if shape.tied else 2),
        other=biases + norms + sinks + _routers(shape),
        vision=shape.vision,
    )


def adapted_layers(shape: ModelShape, target_modules: str | Sequence[str] = "all-linear") -> tuple[Linear, ...]:
    """Return the layers that get an adapter; `all-linear` has the experts and never a router or the LM head."""
    linears = linear_layers(shape)
    if isinstance(target_modules, str):
        return linears
    names = {name.rpartition(".")[2] for name in target_modules}
    return tuple(linear for linear in linears if linear.name.rpartition(".")[2] in names)


def count_lora_parameters(layers: Sequence[Linear], rank: int) -> int:
    """Return the parameters of a LoRA adapter on these layers, exact."""
    return sum(rank * layer.adapters * (layer.inputs + layer.outputs) * layer.copies for layer in layers)


def _routers(shape: ModelShape) -> int:
    experts = shape.experts
    if experts is None:
        return 0
    return experts.count * (shape.hidden + (1 if experts.bias else 0)) * experts.sparse_layers
