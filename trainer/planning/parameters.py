"""Numbers of parameters of a model and of its LoRA adapter, exact.

Base model: the layers as transformers' modelling code declares them. Adapter: Hu et al. 2021, "LoRA"
(arXiv:2106.09685), r x (in + out) for each adapted linear layer, and for each expert of an adapted stack of experts
(PEFT's `transformers_weight_conversion.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.trainer.planning.model_shape import ModelShape, VisionTower


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
        """All parameters."""
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
    """Return the parameters of a base model, exact."""
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
        vision=_vision(shape.vision, shape.hidden) if shape.vision else 0,
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


def _vision(tower: VisionTower, text_hidden: int) -> int:
    """Return the parameters of SigLIP's vision model without its pooling head, and of Gemma 3's projector."""
    hidden = tower.hidden
    patches = (tower.image // tower.patch) ** 2
    embeddings = hidden * 3 * tower.patch**2 + hidden + patches * hidden
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * tower.intermediate + tower.intermediate + hidden
    layer = attention + mlp + 4 * hidden  # two layer norms with bias
    return embeddings + tower.layers * layer + 2 * hidden + hidden * text_hidden + hidden
