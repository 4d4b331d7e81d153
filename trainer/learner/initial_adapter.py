"""Adapters from files: those of experts as vLLM serves them, and an existing adapter as a new agent's first weights.

PEFT adapts the stacked weights of all experts at once: lora_A is (E r, in), expert by expert, and lora_B (out, r E),
with the experts innermost; the wrapper of the first stacked weight is the base layer of the second's. vLLM 0.32 reads
that format for models that stack experts themselves (gpt-oss). For the families named here it takes gate and up rows of
such a file to alternate, which they do not, so the file holds separate matrices; gate and up share lora_A.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged, CheckpointError
from ratchet.trainer.learner import process_group
from ratchet.trainer.learner.agent_state import ADAPTER, AgentState, part
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.settings.learner_settings import LORA_VARIANTS

Weights = dict[str, torch.Tensor]

_PEFT_ALPHA = 8  # lora_alpha of a configuration without one

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
        for expert, piece in enumerate(_parts(weight, side, rank)):
            if not inner:
                split[f"{module}.{expert}.{down}.lora_{side}.weight"] = piece
                continue
            halves = (piece, piece) if side == "A" else piece.chunk(2)
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


# A new agent's weights from an existing PEFT adapter: its file is read, and refused if another function would result.
#
# The optimizer starts over. The adapter must have the learner's rank and layers, and the agent's lora_alpha: with
# others vLLM and the trainer would not compute what the adapter's owner trained.

log = logging.getLogger(__name__)


def with_adapter(trainer: RecordedGRPOTrainer, state: AgentState, folder: Path, base_model: str) -> AgentState:
    """Return a new agent's state with the weights of the adapter in `folder`. Rank zero reads it.

    Raises CheckpointDamaged or CheckpointError.
    """

    def read_checked() -> Weights:
        _check_config(_config(folder), state, folder, base_model)
        return read_adapter(trainer, folder)[1]

    weights, parameters = process_group.tensors_from_leader(read_checked), trainer.lora_parameters()
    return replace(state, lora={name: part(weights[name], parameter).clone() for name, parameter in parameters.items()})


def is_adapter_only(folder: Path) -> bool:
    """Return whether a version is a copy of an adapter without the state of its optimizer. Rank zero looks."""
    return process_group.from_leader(lambda: (folder / checkpoint.ADAPTER_ONLY).is_file())


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(
            f"{folder} is not the folder of a PEFT adapter, its adapter_config.json cannot be read: {error}; "
            "restore it, or set learner.init_adapter to a folder with adapter_config.json and adapter_model.safetensors"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.setdefault("lora_alpha", _PEFT_ALPHA), int | float):
        raise CheckpointDamaged(f"{folder / 'adapter_config.json'} is not the configuration of an adapter")
    return config


def _check_config(config: Mapping[str, Any], state: AgentState, folder: Path, base_model: str) -> None:
    """Raise CheckpointError if the matrices have another meaning; warn if they are of another base model."""
    settings = state.settings
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise CheckpointError(f"{folder} is an adapter of type {kind}, and only LORA can be trained")
    if used := [name for name in LORA_VARIANTS if config.get(name)]:
        raise CheckpointError(
            f"{folder} uses {', '.join(used)}, which the learner does not train: convert it to plain LoRA, or leave "
            "learner.init_adapter out"
        )
    for field in ("r", "lora_alpha"):
        key = "lora_r" if field == "r" else field
        own, saved = getattr(settings, key), config.get(field)
        if saved is not None and saved != own:
            raise CheckpointError(
                f"{folder} has {field} {saved}, and learner.{key} is {own}: set learner.{key} to {saved}"
            )
    named = str(config.get("base_model_name_or_path") or "")
    if named and Path(named).name != Path(base_model).name:
        log.warning(
            "event=init_adapter_of_another_base_model adapter=%s base_model=%s adapter_base_model=%s "
            "remedy='check that it is the same model: the shapes fit, the weights may not'",
            folder, base_model, named,
        )  # fmt: skip


def read_adapter(trainer: RecordedGRPOTrainer, folder: Path) -> tuple[dict[str, Any], Weights]:
    """Return the configuration and the weights, in fp32 by the trainer's names, from which peft omits the adapter's.

    Raises CheckpointDamaged, or CheckpointError if the adapter is not of the trainer's layers and rank.
    """
    config, model_type = _config(folder), trainer.model.config.model_type
    shapes = {name: parameter.shape for name, parameter in trainer.lora_parameters().items()}
    try:
        weights = safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointDamaged(
            f"{folder} has no readable adapter_model.safetensors: {error}; restore it, or save the adapter with PEFT's "
            "save_pretrained"
        ) from error
    if serves_single_experts(model_type):
        weights = join_experts(weights, model_type)
    named = {name: name.replace(f".{ADAPTER}.", ".") for name in shapes}
    if extra := sorted(set(weights) - set(named.values())):
        raise CheckpointError(
            f"{folder} adapts {_layer(extra[0])}{_more(extra)}, which the learner does not: set "
            f"learner.target_modules to the adapter's, {_targets(config)}"
        )
    if missing := sorted(set(named.values()) - set(weights)):
        raise CheckpointError(
            f"{folder} does not adapt {_layer(missing[0])}{_more(missing)}, which the learner does: set "
            f"learner.target_modules to the adapter's, {_targets(config)}"
        )
    for name, short in named.items():
        if weights[short].shape != shapes[name]:
            raise CheckpointError(
                f"{folder} has {_layer(short)} of shape {tuple(weights[short].shape)}, and the learner "
                f"{tuple(shapes[name])}: the adapter is of another base model, or its rank is not learner.lora_r"
            )
    return config, {name: weights[short].to(torch.float32) for name, short in named.items()}


def _layer(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".weight")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} other matrices" if len(names) > 1 else ""


def _targets(config: Mapping[str, Any]) -> str:
    targets = config.get("target_modules")
    return json.dumps(sorted(targets) if isinstance(targets, list) else targets)
