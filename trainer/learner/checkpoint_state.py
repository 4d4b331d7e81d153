"""Writes and reads the learner's state in a checkpoint folder.

    adapter_config.json, adapter_model.safetensors   the adapter, as vLLM and peft load it
    learner/lora.safetensors                         the same weights in fp32, as trained
    learner/optimizer.pt, rng.pt                     the other state that determines the next step
    learner/state.json                               step, state of the learning rate, and the settings

Promises that a resumed learner is bitwise the saved one, also if the state replaces that of a running learner. The
exception: the optimizer starts over between SFT and RL. All files are serialized in memory and written as bytes, so
that a full disk raises an OSError with its errno.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from peft import get_peft_model_state_dict

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged, CheckpointError
from ratchet.trainer.learner import process_group
from ratchet.trainer.learner.agent_state import ADAPTER, AgentState, fill, local, new_rate, part, random_state, whole
from ratchet.trainer.learner.initial_adapter import read_adapter, served_config, serves_single_experts, split_experts
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import find_objective

FOLDER = checkpoint.STATE

# Settings that shape the adapter; a checkpoint with other values cannot be resumed.
_SHAPING = ("lora_r", "lora_alpha", "target_modules", "exclude_modules")


@dataclass(frozen=True, slots=True)
class SavedState:
    """An agent's state as a checkpoint holds it: whole tensors on the CPU."""

    lora: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]  # torch's state_dict
    random: Mapping[str, Any]
    rate: Mapping[str, Any] | None
    settings: Mapping[str, Any]
    step: int


def gathered(trainer: RecordedGRPOTrainer, state: AgentState) -> SavedState:
    """Return the state of the trainer's agent. All processes must call it; its tensors are whole in each."""
    optimizer = trainer.optimizer.state_dict()
    # Interned, because pickle writes equal keys that are different objects in other bytes.
    slots = {
        index: {
            sys.intern(key): whole(value) if isinstance(value, torch.Tensor) else value for key, value in slot.items()
        }
        for index, slot in optimizer["state"].items()
    }
    return SavedState(
        lora={name: whole(parameter) for name, parameter in trainer.lora_parameters().items()},
        optimizer={**optimizer, "state": slots},
        random=random_state(),
        rate=state.rate.state(),
        settings=asdict(state.settings),
        step=state.step,
    )


def write(trainer: RecordedGRPOTrainer, saved: SavedState, folder: Path) -> None:
    """Write adapter and learner state into the existing, empty `folder`."""
    _write_adapter(trainer, saved.lora, folder)
    inner = folder / FOLDER
    inner.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in saved.lora.items()}
    (inner / "lora.safetensors").write_bytes(safetensors.torch.save(weights))
    _write_torch(inner / "optimizer.pt", saved.optimizer)
    _write_torch(inner / "rng.pt", saved.random)
    state = {"step": saved.step, "rate": saved.rate, "settings": saved.settings}
    (inner / "state.json").write_text(json.dumps(state, indent=2, default=list) + "\n")


def read(folder: Path, settings: LearnerSettings, shapes: Mapping[str, torch.Size]) -> SavedState:
    """Return the state saved in `folder`, for an adapter of these shapes.

    Raises CheckpointDamaged or CheckpointError.
    """
    inner = folder / FOLDER
    if not checkpoint.complete(folder) or not (inner / "state.json").is_file():
        raise CheckpointDamaged(
            f"{folder} is not a complete checkpoint of a learner (older ones have only their adapter, see "
            "trainer.keep_optimizer_states); resume from another one"
        )
    state = json.loads((inner / "state.json").read_text())
    _check_settings(settings, state["settings"], folder)
    weights = safetensors.torch.load((inner / "lora.safetensors").read_bytes())
    if {name: weight.shape for name, weight in weights.items()} != dict(shapes):
        raise CheckpointError(
            f"{folder} has the adapter of another base model: its layers differ; resume it with that model"
        )
    return SavedState(
        lora=weights,
        optimizer=_read_torch(inner / "optimizer.pt"),
        random=_read_torch(inner / "rng.pt"),
        rate=state.get("rate"),
        settings=state["settings"],
        step=int(state["step"]),
    )


def shared(read_state: Callable[[], SavedState]) -> SavedState:
    """Return in all processes the state that rank zero reads, or raise its TrainerError."""
    read_here: list[SavedState] = []

    def read_without_tensors() -> SavedState:
        read_here.append(read_state())
        return replace(read_here[0], lora={}, optimizer={**read_here[0].optimizer, "state": {}})

    rest = process_group.from_leader(read_without_tensors)
    tensors = process_group.tensors_from_leader(lambda: _tensors(read_here[0]))
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, index, key = name.split("/", 2)
        if kind == "optimizer":
            slots.setdefault(int(index), {})[key] = tensor
    lora = {name.removeprefix("lora/0/"): tensor for name, tensor in tensors.items() if name.startswith("lora/")}
    return replace(rest, lora=lora, optimizer={**rest.optimizer, "state": slots})


def _tensors(saved: SavedState) -> dict[str, torch.Tensor]:
    lora = {f"lora/0/{name}": tensor for name, tensor in saved.lora.items()}
    return lora | {
        f"optimizer/{index}/{key}": torch.as_tensor(value)
        for index, slot in saved.optimizer["state"].items()
        for key, value in slot.items()
    }


def resumed(trainer: RecordedGRPOTrainer, settings: LearnerSettings, saved: SavedState) -> AgentState:
    """Return the state of an agent with the weights, optimizer, step and random numbers of a checkpoint.

    It takes over the tensors of `saved`.
    """
    parameters = trainer.lora_parameters()
    slots = saved.optimizer["state"] if _is_sft(settings.loss_type) == _is_sft(saved.settings["loss_type"]) else {}
    # torch numbers the parameters in the order of the optimizer's groups.
    ordered = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    names = {parameter: name for name, parameter in parameters.items()}
    rate = new_rate(trainer, settings)
    rate.restore(saved.rate)
    return AgentState(
        settings=settings,
        rate=rate,
        lora={name: part(saved.lora[name], parameter) for name, parameter in parameters.items()},
        moments={
            names[ordered[index]]: {key: part(value, ordered[index]) for key, value in slot.items()}
            for index, slot in slots.items()
        },
        random=dict(saved.random),
        step=saved.step,
    )


@contextmanager
def temporary_adapter(trainer: RecordedGRPOTrainer, folder: Path) -> Iterator[None]:
    """Use the adapter in `folder`, as vLLM loads it, in the block; afterwards restore the current one bit for bit. If
    its `lora_alpha` is not the agent's, its weights are scaled to the same effect.

    Raises CheckpointDamaged or CheckpointError before any change. Rank zero reads the folder.
    """
    parameters = trainer.lora_parameters()

    def read_scaled() -> dict[str, torch.Tensor]:
        config, weights = read_adapter(trainer, folder)
        scale = config["lora_alpha"] / trainer.model.peft_config[ADAPTER].lora_alpha
        return {name: weight * scale if "lora_B" in name else weight for name, weight in weights.items()}

    weights = process_group.tensors_from_leader(read_scaled)
    own = {name: local(parameter.detach()).clone() for name, parameter in parameters.items()}
    try:
        fill(trainer, {name: part(weights[name], parameter) for name, parameter in parameters.items()})
        yield
    finally:
        fill(trainer, own)


def _is_sft(loss: str) -> bool:
    """Return whether AdamW's moments are those of SFT, whose gradients are many times those of RL."""
    return find_objective(loss).ratio == "none"


def _write_adapter(trainer: RecordedGRPOTrainer, lora: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter for serving, in the number format of the base model, to which vLLM casts it anyway."""
    dtype = trainer.model.get_input_embeddings().weight.dtype  # also of a quantized base model
    # For embeddings peft would look up the base model's configuration, possibly on the hub.
    adapter = get_peft_model_state_dict(trainer.model, state_dict=dict(lora), save_embedding_layers=False)
    config = trainer.model.peft_config[ADAPTER].to_dict()
    if serves_single_experts(model_type := trainer.model.config.model_type):
        adapter = split_experts(adapter, model_type, config["r"])
        config = served_config(config, model_type)
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in adapter.items()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (folder / "adapter_config.json").write_text(text + "\n")


def _plain(value: Any) -> Any:
    """Return sets as sorted lists and other values (enumerations) as text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _check_settings(settings: LearnerSettings, saved: dict[str, Any], folder: Path) -> None:
    now = json.loads(json.dumps(asdict(settings), default=list))
    for field in _SHAPING:
        if now[field] != saved.get(field):
            raise CheckpointError(
                f"{folder} was trained with {field} {saved.get(field)!r}, the setting is {now[field]!r}: "
                f"set {field} back, or start without resuming"
            )


def _write_torch(path: Path, value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getbuffer())


def _read_torch(path: Path) -> Any:
    # weights_only: loading a checkpoint must never run code.
    return torch.load(path, map_location="cpu", weights_only=True)
