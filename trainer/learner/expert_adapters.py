"""Adapters of experts as vLLM serves them: one pair of matrices for each layer of each expert.

PEFT adapts the stacked weights of all experts at once: lora_A is (E r, in), expert by expert, and lora_B (out, r E),
with the experts innermost; the wrapper of the first stacked weight is the base layer of the second's. vLLM 0.32 reads
that format for models that stack experts themselves (gpt-oss). For the families named here it takes gate and up rows of
such a file to alternate, which they do not, so the file holds separate matrices; gate and up share lora_A. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

Weights = dict[str, torch.Tensor]

# Names of the gate, up and down projection of an expert, by model type.
_LAYERS = {
    "qwen2_moe": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
}
_STACKED = re.compile(r"(.*\.experts)(\.base_layer)?\.lora_(A|B)\.weight")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.lora_(A|B)\.weight")


def serves_single_experts(model_type: str) -> bool:
    """Return whether vLLM reads separate matrices for each expert of the model."""
    return model_type in _LAYERS


def split_experts(weights: Mapping[str, torch.Tensor], model_type: str, rank: int) -> Weights:
    """Return PEFT's weights of an adapter with separate matrices for each expert."""
    gate, up, down = _LAYERS[model_type]
    split: Weights = {}
    for name, weight in weights.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            split[name] = weight
            continue
        module, inner, side = found.groups()
        for expert, part in enumerate(_parts(weight, side, rank)):
            if not inner:
                split[f"{module}.{expert}.{down}.lora_{side}.weight"] = part
                continue
            halves = (part, part) if side == "A" else part.chunk(2)
            for layer, half in zip((gate, up), halves, strict=True):
                split[f"{module}.{expert}.{layer}.lora_{side}.weight"] = half.clone()
    return split


def join_experts(weights: Mapping[str, torch.Tensor], model_type: str) -> Weights:
    """Return the weights of `split_experts` as PEFT holds them."""
    gate, up, down = _LAYERS[model_type]
    joined: Weights = {}
    parts: dict[tuple[str, str], dict[tuple[int, str], torch.Tensor]] = {}
    for name, weight in weights.items():
        found = _SINGLE.fullmatch(name)
        if found is None:
            joined[name] = weight
        else:
            module, expert, layer, side = found.groups()
            parts.setdefault((module, side), {})[int(expert), layer] = weight
    for (module, side), matrices in parts.items():
        count = 1 + max(expert for expert, _ in matrices)
        wide = [
            matrices[e, gate] if side == "A" else torch.cat([matrices[e, gate], matrices[e, up]]) for e in range(count)
        ]
        joined[f"{module}.base_layer.lora_{side}.weight"] = _stack(wide, side)
        joined[f"{module}.lora_{side}.weight"] = _stack([matrices[e, down] for e in range(count)], side)
    return joined


def served_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the content of adapter_config.json for weights of `split_experts`."""
    if not config.get("target_parameters"):
        return dict(config)
    modules = {*config["target_modules"], *_LAYERS[model_type]}
    return {**config, "target_modules": sorted(modules), "target_parameters": None}


def _parts(weight: torch.Tensor, side: str, rank: int) -> list[torch.Tensor]:
    """Return the matrices of each expert, (r, in) or (out, r)."""
    if side == "A":
        return [part.contiguous() for part in weight.reshape(-1, rank, weight.shape[-1])]
    return [part.contiguous() for part in weight.reshape(weight.shape[0], rank, -1).unbind(-1)]


def _stack(parts: list[torch.Tensor], side: str) -> torch.Tensor:
    return torch.cat(parts) if side == "A" else torch.stack(parts, -1).flatten(1)
