"""Which layers of a base model get an adapter: `target_modules` and `exclude_modules` as PEFT's configuration.

`all-linear` means the linear layers of the text decoder and the experts of a mixture of experts. It leaves out the LM
head, routers, whose choice a small change can turn over for every token, and everything outside of the decoder: vision
and audio towers and their projectors, which text never reaches. PEFT's own `all-linear` includes those, and experts of
some families only. transformers stacks experts in parameters of three dimensions; next to them the linear layers with
the names of an expert's (dense layers, shared experts) are left out, because PEFT takes those names for the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from ratchet.trainer.settings.learner_settings import LearnerSettings

ALL_LINEAR = "all-linear"
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def lora_config(model: Any, settings: LearnerSettings) -> LoraConfig:
    """Return PEFT's configuration of a new adapter for the model."""
    modules: Any = settings.target_modules
    excluded = [*settings.exclude_modules]
    experts = sorted({name for name, _ in stacked_experts(model)})
    if modules == ALL_LINEAR:
        modules = sorted(name for name in _linear_layers(model, bool(experts)) if not _ends_with(name, excluded))
        experts = [name for name in experts if not _ends_with(name, excluded)]
    elif not isinstance(modules, str):
        named = set(modules)
        experts = experts if named & _EXPERT_LAYERS else []  # vLLM serves all layers of an expert or none
        modules = sorted(named - _EXPERT_LAYERS) if experts else sorted(named)
    else:
        experts = []
    return LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        target_modules=modules,
        target_parameters=experts or None,
        exclude_modules=None if settings.target_modules == ALL_LINEAR else excluded or None,
        task_type="CAUSAL_LM",
    )


def stacked_experts(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the stacked weights of experts under the ends of their names, such as experts.gate_up_proj."""
    for name, parameter in model.get_decoder().named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner.split(".")[-1] == "experts" and parameter.ndim == 3:
            yield f"experts.{leaf}", parameter


def _linear_layers(model: Any, mixture: bool) -> Iterator[str]:
    """Yield the names of the decoder's linear layers."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or id(module) not in inside or module is head:
            continue
        parts = name.split(".")
        if _ROUTERS.isdisjoint(parts) and not (mixture and parts[-1] in _EXPERT_LAYERS):
            yield name


def _ends_with(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


# LoRA of a linear layer with fewer passes over its activations; the result is PEFT's.
#
# PEFT casts the layer's input to the adapter's fp32, which autocast casts back, and adds the adapter's output in three
# passes over tensors as large as the layer's output. Here the adapter's second matrix product adds to the base layer's
# output in place, and in the backward pass its product adds to the input's gradient. Layers of other kinds (quantized,
# with dropout or a variant such as DoRA) keep PEFT's forward.

_PEFT_FORWARD = Linear.forward


def use_fused_lora(model: torch.nn.Module) -> int:
    """Replace the forward of the LoRA layers that allow it; return their number."""
    layers = [module for module in model.modules() if type(module) is Linear and _fits(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _fits(layer: Any) -> bool:
    plain = type(layer.base_layer) is torch.nn.Linear and not layer.fan_in_fan_out
    names = list(layer.lora_A)
    return plain and all(
        isinstance(layer.lora_dropout[name], torch.nn.Identity)
        and name not in layer.lora_variant
        and layer.lora_B[name].bias is None
        for name in names
    )


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    weight = layer.base_layer.weight
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if args or kwargs or layer.disable_adapters or layer.merged or len(active) != 1:
        return _PEFT_FORWARD(layer, x, *args, **kwargs)
    (name,) = active
    if not torch.is_autocast_enabled(device) and not x.dtype == weight.dtype == layer.lora_A[name].weight.dtype:
        return _PEFT_FORWARD(layer, x)
    out: torch.Tensor = _FusedLora.apply(
        x.to(dtype),
        weight,
        layer.base_layer.bias,
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.scaling[name],
    )
    return out


class _FusedLora(torch.autograd.Function):
    """x W' + bias + scaling x A' B', computed in x's dtype; the base weight W has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # (..., in)
        weight: torch.Tensor,  # (out, in)
        bias: torch.Tensor | None,  # (out,)
        a: torch.Tensor,  # (r, in)
        b: torch.Tensor,  # (out, r)
        scaling: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (M, in)
        with torch.autocast(x.device.type, enabled=False):
            low = rows @ a.to(x.dtype).t() * scaling  # (M, r)
            out = torch.nn.functional.linear(rows, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            out.addmm_(low, b.to(x.dtype).t())
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])  # (M, in)
        out = gradients[0].reshape(rows.shape[0], -1)  # (M, out)
        low_gradient = out @ b.to(x.dtype) * ctx.scaling  # (M, r)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (out @ weight.to(x.dtype)).addmm_(low_gradient, a.to(x.dtype)).view_as(x)
        of_a = (low_gradient.t() @ rows).to(a.dtype) if ctx.needs_input_grad[3] else None
        of_b = (out.t() @ low).to(b.dtype) if ctx.needs_input_grad[4] else None
        return of_x, None, None, of_a, of_b, None
