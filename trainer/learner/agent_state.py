"""The state of one agent in a learner: adapter, optimizer, learning rate, random numbers.

The base model and the tensors that it computes with stay where they are. An agent's state waits on the CPU, and
`install` copies it into those tensors, so that changing the agent allocates nothing on the GPU. With a sharded model
each process holds its own part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import set_seed

from ratchet.trainer.learner.learning_rate import LearningRateController
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.settings.learner_settings import LearnerSettings

ADAPTER = "default"  # the adapter's name in peft

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class AgentState:
    """One agent. `lora` and `moments` (the optimizer's, by parameter and name) are this process's parts."""

    settings: LearnerSettings
    rate: LearningRateController
    lora: Tensors
    random: dict[str, Any]
    moments: dict[str, Tensors] = field(default_factory=dict)
    step: int = 0


def new_state(trainer: RecordedGRPOTrainer, settings: LearnerSettings) -> AgentState:
    """Return the state of an agent that was never trained; its adapter's initial weights follow from its seed."""
    set_seed(settings.seed)
    parameters = trainer.lora_parameters()
    weights = initial_weights({name: p.shape for name, p in parameters.items()}, settings.seed)
    return AgentState(
        settings=settings,
        rate=new_rate(trainer, settings),
        lora={name: _held(part(weights[name], p)) for name, p in parameters.items()},
        random=random_state(),
    )


def new_rate(trainer: RecordedGRPOTrainer, settings: LearnerSettings) -> LearningRateController:
    """Return the learning rate of an agent that was never trained."""
    return LearningRateController(settings, trainer.rate_controller.parameters, trainer.rate_controller.dtype)


def initial_weights(shapes: Mapping[str, torch.Size], seed: int) -> Tensors:
    """Return peft's initial LoRA weights: the second matrix is 0, so that the policy is the base model."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.zeros(shape)
        if "lora_A" in name:
            torch.nn.init.kaiming_uniform_(weights[name], a=math.sqrt(5), generator=generator)
        elif "lora_embedding_B" in name:
            torch.nn.init.normal_(weights[name], generator=generator)
    return weights


def install(trainer: RecordedGRPOTrainer, state: AgentState) -> None:
    """Make the trainer that of the agent. Model, parameters and optimizer stay the same objects."""
    trainer.optimizer.zero_grad()  # an aborted round may have left gradients
    trainer.rate_controller = state.rate
    trainer.apply_settings(state.settings)
    _set_scale(trainer, state.settings)
    fill(trainer, state.lora)
    _fill_moments(trainer, state.moments)
    trainer.set_learning_rate(state.rate.rate)
    set_random_state(state.random)


def capture(trainer: RecordedGRPOTrainer, state: AgentState) -> None:
    """Copy the trainer's state into that of its agent."""
    for name, parameter in trainer.lora_parameters().items():
        state.lora[name].copy_(local(parameter.detach()))
        values = trainer.optimizer.state.get(parameter, {})
        held = state.moments.setdefault(name, {})
        for key, value in values.items():
            if key in held:
                held[key].copy_(local(value))
            else:
                held[key] = _held(local(value))
    if not trainer.optimizer.state:
        state.moments = {}
    state.random = random_state()


def fill(trainer: RecordedGRPOTrainer, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy LoRA weights, this process's parts, into the trainer's parameters."""
    with torch.no_grad():
        for name, parameter in trainer.lora_parameters().items():
            local(parameter).copy_(weights[name])


def part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor of which `like` is sharded or whole."""
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full
    device = like.device_mesh.device_type
    sharded = distribute_tensor(full.to(device), like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local().to(full.device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that may be sharded; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded, on the CPU. All processes must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def random_state() -> dict[str, Any]:
    """Return the state of the random numbers as lists and tensors only, so that loading it needs no pickled code."""
    generator: Any = numpy.random.get_state(legacy=True)
    algorithm, keys, *rest = generator
    return {
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a `random_state`."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _fill_moments(trainer: RecordedGRPOTrainer, moments: Mapping[str, Tensors]) -> None:
    """Copy an agent's moments into the optimizer's; without any, the optimizer starts over."""
    optimizer = trainer.optimizer
    if not moments:
        optimizer.state.clear()
        return
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in trainer.lora_parameters().items():
        slot = optimizer.state[parameter]
        for key, value in moments[name].items():
            if key == "step":  # a number; fused optimizers keep it beside the parameter
                slot[key] = value.to(parameter.device if fused else "cpu", copy=True)
                continue
            if key not in slot:
                slot[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            local(slot[key]).copy_(value)


def _set_scale(trainer: RecordedGRPOTrainer, settings: LearnerSettings) -> None:
    trainer.model.peft_config[ADAPTER].lora_alpha = settings.lora_alpha
    for layer in trainer.model.modules():
        if isinstance(layer, BaseTunerLayer) and ADAPTER in getattr(layer, "scaling", {}):
            layer.lora_alpha[ADAPTER] = settings.lora_alpha
            layer.scaling[ADAPTER] = settings.lora_alpha / settings.lora_r


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, pinned where there is a GPU, so that copies to it are fast."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return copied.copy_(tensor.detach())
