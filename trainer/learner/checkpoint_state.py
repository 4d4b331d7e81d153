"""What a learner's checkpoint folder holds, written and read back.

    adapter_config.json, adapter_model.safetensors   the adapter, as vLLM and peft load it
    learner/lora.safetensors                         the same weights in fp32, as they are trained
    learner/optimizer.pt, scheduler.pt, rng.pt       the rest of what makes the next step what it would have been
    learner/state.json                               step, what steers the learning rate, and the settings

Promises that a resumed learner is bitwise the one that was saved, also where it is put into a learner that has trained
since; only between a warm start and what follows it the optimiser begins anew. Everything is serialised in memory and
written as plain bytes, because a full disk then is an OSError with its number. Does not decide where or when to save.
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

# Settings that decide which weights there are; a checkpoint of other ones cannot be continued.
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
    state = {"step": step, "rate": trainer.steering.state(), "settings": asdict(settings)}
    (inner / "state.json").write_text(json.dumps(state, indent=2, default=list) + "\n")


def held(trainer: RecordedGRPOTrainer) -> dict[str, Any]:
    """Return a copy, on the CPU, of what a trainer holds beside its base model: what `put` puts back."""
    state = {
        "lora": {name: p.detach().cpu() for name, p in trainer.lora_parameters().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "rng": _rng_state(),
    }
    return copy.deepcopy(state)


def put(trainer: RecordedGRPOTrainer, settings: LearnerSettings, state: dict[str, Any]) -> None:
    """Put back what `held` returned, in place: the parameters and the base model stay the objects that they are."""
    trainer.optimizer.zero_grad()  # a round that broke off may have left a gradient
    _fill(trainer.lora_parameters(), state["lora"])
    trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    trainer.lr_scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    trainer.steering.adopt(settings)
    trainer.set_learning_rate(trainer.steering.rate)
    _set_rng_state(state["rng"])


def read(trainer: RecordedGRPOTrainer, settings: LearnerSettings, folder: Path) -> int:
    """Put the state saved in `folder` into the trainer; returns the global step.

    Raises CheckpointDamaged or CheckpointMismatch, before anything is changed.
    """
    inner = folder / FOLDER
    if not checkpoint.complete(folder) or not (inner / "state.json").is_file():
        raise CheckpointDamaged(
            f"{folder} is not a complete checkpoint of a learner (older ones keep only their adapter, see "
            "trainer.keep_optimizer_states); resume from another one"
        )
    state = json.loads((inner / "state.json").read_text())
    _check_settings(settings, state["settings"], folder)
    weights = safetensors.torch.load((inner / "lora.safetensors").read_bytes())
    parameters = trainer.lora_parameters()
    if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in parameters.items()}:
        raise CheckpointMismatch(
            f"{folder} holds the adapter of another base model: its layers differ; resume it there"
        )
    _fill(parameters, weights)
    if _is_imitation(settings.loss_type) == _is_imitation(str(state["settings"]["loss_type"])):
        trainer.optimizer.load_state_dict(_read_torch(inner / "optimizer.pt"))
    trainer.lr_scheduler.load_state_dict(_read_torch(inner / "scheduler.pt"))
    trainer.steering.restore(state.get("rate"))
    trainer.set_learning_rate(trainer.steering.rate)
    _set_rng_state(_read_torch(inner / "rng.pt"))
    return int(state["step"])


@contextmanager
def lent(trainer: RecordedGRPOTrainer, folder: Path) -> Iterator[None]:
    """Hold the adapter in `folder`, as vLLM loads it, until the block ends; then the own one again, bit for bit.

    Raises CheckpointDamaged or CheckpointMismatch, before anything is changed.
    """
    try:
        weights = safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} holds no adapter that can be read: {error}") from error
    parameters = trainer.lora_parameters()
    lent = {name: weights.get(name.replace(".default.", ".")) for name in parameters}  # peft leaves its own name out
    if any(tensor is None or tensor.shape != parameters[name].shape for name, tensor in lent.items()):
        raise CheckpointMismatch(f"{folder} holds the adapter of another base model or rank: its layers differ")
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        _fill(parameters, lent)
        yield
    finally:
        _fill(parameters, own)


def _fill(parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _is_imitation(loss: str) -> bool:
    """Whether AdamW's moments are those of imitation: its gradients are many times those of a policy's."""
    return OBJECTIVES[loss].ratio == "none"


def _write_adapter(trainer: RecordedGRPOTrainer, folder: Path) -> None:
    """The adapter for serving: bf16 beside a bf16 base on the GPU, fp32 on the CPU.

    vLLM casts an adapter to the dtype it serves in, so fp32 there would only be twice the bytes. On the CPU the served
    logprobs are compared with an fp32 trainer's, and nothing is rounded before vLLM does.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    dtype = torch.float32 if trainer.accelerator.device.type == "cpu" else torch.bfloat16
    # Asking peft for embeddings would make it look up the base model's configuration, on the hub if it has to.
    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in adapter.items()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    config = model.peft_config["default"].to_dict()
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (folder / "adapter_config.json").write_text(text + "\n")


def _plain(value: Any) -> Any:
    """Sets become sorted lists, and what remains (enumerations) its own text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _check_settings(settings: LearnerSettings, saved: dict[str, Any], folder: Path) -> None:
    now = json.loads(json.dumps(asdict(settings), default=list))
    for field in _SHAPING:
        if now[field] != saved[field]:
            raise CheckpointMismatch(
                f"{folder} was trained with {field} {saved[field]!r}, the setting is {now[field]!r}: "
                f"set {field} back, or start anew without resuming"
            )


def _rng_state() -> dict[str, Any]:
    """Lists and tensors only, so that reading it back needs no pickled code."""
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
    # weights_only: a checkpoint is data, and loading it must never run code.
    return torch.load(path, map_location="cpu", weights_only=True)
