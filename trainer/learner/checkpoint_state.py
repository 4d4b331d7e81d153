"""Writes and reads the learner's state in a checkpoint folder.

    adapter_config.json, adapter_model.safetensors   the adapter, as vLLM and peft load it
    learner/lora.safetensors                         the same weights in fp32, as trained
    learner/optimizer.pt, scheduler.pt, rng.pt       the other state that determines the next step
    learner/state.json                               step, state of the learning rate, and the settings

Promises that a resumed learner is bitwise the saved one, also if the state replaces that of a running learner. The
exception: the optimizer starts over between SFT and RL. All files are serialized in memory and written as bytes, so
that a full disk raises an OSError with its errno.
"""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
from peft import get_peft_model_state_dict

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged, CheckpointMismatch
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import OBJECTIVES

FOLDER = checkpoint.STATE

# Settings that shape the adapter; a checkpoint with other values cannot be resumed.
_SHAPING = ("lora_r", "lora_alpha", "target_modules")


def write(trainer: RecordedGRPOTrainer, settings: LearnerSettings, step: int, folder: Path) -> None:
    """Write adapter and learner state into the existing, empty `folder`."""
    _write_adapter(trainer, folder)
    inner = folder / FOLDER
    inner.mkdir()
    weights = {name: p.detach().cpu().contiguous() for name, p in trainer.lora_parameters().items()}
    (inner / "lora.safetensors").write_bytes(safetensors.torch.save(weights))
    _write_torch(inner / "optimizer.pt", trainer.optimizer.state_dict())
    _write_torch(inner / "scheduler.pt", trainer.lr_scheduler.state_dict())
    _write_torch(inner / "rng.pt", _rng_state())
    state = {"step": step, "rate": trainer.rate_controller.state(), "settings": asdict(settings)}
    (inner / "state.json").write_text(json.dumps(state, indent=2, default=list) + "\n")


def snapshot(trainer: RecordedGRPOTrainer) -> dict[str, Any]:
    """Return a copy of a trainer's state without its base model, on the CPU; `restore` takes it."""
    state = {
        "lora": {name: p.detach().cpu() for name, p in trainer.lora_parameters().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "rng": _rng_state(),
    }
    return copy.deepcopy(state)


def restore(trainer: RecordedGRPOTrainer, settings: LearnerSettings, state: dict[str, Any]) -> None:
    """Restore a `snapshot` in place; parameters and base model stay the same objects."""
    trainer.optimizer.zero_grad()  # an aborted round may have left gradients
    _fill(trainer.lora_parameters(), state["lora"])
    trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    trainer.lr_scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    trainer.rate_controller.apply_settings(settings)
    trainer.set_learning_rate(trainer.rate_controller.rate)
    _set_rng_state(state["rng"])


def read(trainer: RecordedGRPOTrainer, settings: LearnerSettings, folder: Path) -> int:
    """Load the state saved in `folder` into the trainer; return the global step.

    Raises CheckpointDamaged or CheckpointMismatch before any change.
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
    parameters = trainer.lora_parameters()
    if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in parameters.items()}:
        raise CheckpointMismatch(
            f"{folder} has the adapter of another base model: its layers differ; resume it with that model"
        )
    _fill(parameters, weights)
    if _is_sft(settings.loss_type) == _is_sft(str(state["settings"]["loss_type"])):
        trainer.optimizer.load_state_dict(_read_torch(inner / "optimizer.pt"))
    trainer.lr_scheduler.load_state_dict(_read_torch(inner / "scheduler.pt"))
    trainer.rate_controller.restore(state.get("rate"))
    trainer.set_learning_rate(trainer.rate_controller.rate)
    _set_rng_state(_read_torch(inner / "rng.pt"))
    return int(state["step"])


@contextmanager
def temporary_adapter(trainer: RecordedGRPOTrainer, folder: Path) -> Iterator[None]:
    """Use the adapter in `folder`, as vLLM loads it, in the block; afterwards restore the current one bit for bit.

    Raises CheckpointDamaged or CheckpointMismatch before any change.
    """
    try:
        weights = safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} has no readable adapter: {error}") from error
    parameters = trainer.lora_parameters()
    other = {name: weights.get(name.replace(".default.", ".")) for name in parameters}  # peft omits the adapter's name
    if any(tensor is None or tensor.shape != parameters[name].shape for name, tensor in other.items()):
        raise CheckpointMismatch(f"{folder} has the adapter of another base model or rank: its layers differ")
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        _fill(parameters, other)
        yield
    finally:
        _fill(parameters, own)


def _fill(parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _is_sft(loss: str) -> bool:
    """Return whether AdamW's moments are those of SFT, whose gradients are many times those of RL."""
    return OBJECTIVES[loss].ratio == "none"


def _write_adapter(trainer: RecordedGRPOTrainer, folder: Path) -> None:
    """Write the adapter for serving: bf16 on the GPU, like the base model; fp32 on the CPU.

    vLLM casts an adapter to its serving dtype, so fp32 on the GPU would only double the size. On the CPU the served
    logprobs are compared with those of an fp32 trainer.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    dtype = torch.float32 if trainer.accelerator.device.type == "cpu" else torch.bfloat16
    # For embeddings peft would look up the base model's configuration, possibly on the hub.
    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in adapter.items()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    config = model.peft_config["default"].to_dict()
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (folder / "adapter_config.json").write_text(text + "\n")


def _plain(value: Any) -> Any:
    """Return sets as sorted lists and other values (enumerations) as text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _check_settings(settings: LearnerSettings, saved: dict[str, Any], folder: Path) -> None:
    now = json.loads(json.dumps(asdict(settings), default=list))
    for field in _SHAPING:
        if now[field] != saved[field]:
            raise CheckpointMismatch(
                f"{folder} was trained with {field} {saved[field]!r}, the setting is {now[field]!r}: "
                f"set {field} back, or start without resuming"
            )


def _rng_state() -> dict[str, Any]:
    """Return lists and tensors only, so that loading needs no pickled code."""
    generator: Any = numpy.random.get_state(legacy=True)
    algorithm, keys, *rest = generator
    return {
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _write_torch(path: Path, value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getbuffer())


def _read_torch(path: Path) -> Any:
    # weights_only: loading a checkpoint must never run code.
    return torch.load(path, map_location="cpu", weights_only=True)
