"""The base model over several processes: each has a copy, or a part of every tensor (FSDP2); and its gradients.

With FSDP2 (torch's `fully_shard`) a process holds 1 / processes of weights, adapter and optimizer. It needs on top one
decoder layer whole, at times two, and from the forward to the backward pass the last norm and the LM head, with the
embedding if they are tied. Files are read by parts too (transformers' DistributedConfig), so that no process ever holds
the whole model. The adapter is attached to an empty model first: fully_shard leaves out what comes after it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from ratchet.trainer.learner import process_group
from ratchet.trainer.learner.forward_pass import choose_attention
from ratchet.trainer.learner.launch import processes


def attach_sharded(loaded: Any, lora: LoraConfig, attention: str, device: str) -> PeftModel:
    """Return a model with a LoRA adapter, both sharded. It takes the weights of `loaded`, which is then empty.

    Raises ValueError if the adapter does not fit, SettingError if the attention does not.
    """
    config = copy.deepcopy(loaded.config)
    config.distributed_config = None
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
        choose_attention(base, attention)
        model = get_peft_model(base, lora)
    mesh = init_device_mesh(device, (processes(),))
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if embedding.weight is not head.weight:
        fully_shard(embedding, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _take_weights(model, loaded)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_give_gradients)
    return model


def _take_weights(model: Any, loaded: Any) -> None:
    """Give the sharded, empty model the weights and buffers of the loaded one, and 0 to its adapter."""
    weights = dict(loaded.named_parameters(remove_duplicate=False))
    taken = {}
    for name, empty in model.named_parameters(remove_duplicate=False):
        own = weights.get(_name_in_base(name))
        if own is None:
            parts = torch.zeros(empty.to_local().shape, dtype=empty.dtype, device=empty.device_mesh.device_type)
        else:
            parts = _part(own.detach(), empty)
        taken[name] = DTensor.from_local(
            parts, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )
    buffers = dict(loaded.named_buffers())
    for name, _ in list(model.named_buffers()):
        module, _, buffer = name.rpartition(".")
        model.get_submodule(module)._buffers[buffer] = buffers[_name_in_base(name)]
    model.load_state_dict(taken, strict=False, assign=True)
    loaded.to("meta") if processes() == 1 else None
    gc.collect()


def _name_in_base(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this process's part of a loaded tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    assert all(isinstance(placement, Shard) for placement in like.placements)
    return tensor.to(like.device_mesh.device_type)


def _give_gradients(module: Any, _: Any) -> None:
    """Give every trained parameter of an FSDP group a gradient of 0 before its layer runs.

    The processes add up the gradients that they have: one that did not use a parameter, as of an expert without a
    token, must have one as well.
    """
    if not torch.is_grad_enabled():
        return
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None and not isinstance(parameter, DTensor):
            parameter.grad = torch.zeros_like(parameter)


@contextmanager
def gradient_sync(model: torch.nn.Module, *, last: bool) -> Iterator[None]:
    """Compute the gradient of a micro-batch in the block; of the step's `last` one, the mean over the processes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
        return
    yield
    if last:
        process_group.average_gradients(p for p in model.parameters() if p.requires_grad)


def reshard(model: torch.nn.Module) -> None:
    """Drop what a pass without a backward pass leaves whole: the last norm and the head."""
    if isinstance(model, FSDPModule):
        model.reshard()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], scale: float, limit: float) -> float:
    """Multiply the gradients by `scale`, then clip their norm; return the norm before that."""
    trained = list(parameters)
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    norm = torch.nn.utils.clip_grad_norm_(trained, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def over_parts(parameters: Iterable[torch.Tensor], value: float) -> float:
    """Return the sum over the processes of a value of each one's part; that of a model held whole is `value`."""
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    return process_group.total(value) if sharded else value
