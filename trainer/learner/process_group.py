"""The training processes of a learner: what they tell each other, and a model of which each has a copy or a part."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from ratchet.trainer.errors import TrainerError
from ratchet.trainer.learner.forward_pass import choose_attention
from ratchet.trainer.learner.launch import IDLE_TIMEOUT, local_rank, processes, rank

# The training processes of a learner: what they tell each other, and the gradients of a model that is not sharded.
#
# Every process runs the same operations with the same rows. Rank zero alone reads and writes files; what it reads, or
# the error that it has, reaches the others. The processes are those of torchrun's or `accelerate launch`'s variables.

Value = TypeVar("Value")


def join(*, alone: bool = False) -> None:
    """Join the process group of the launch: gloo for the CPU, and NCCL for GPUs.

    A single process needs none, except `alone` with a sharded model.
    """
    if dist.is_initialized() or (processes() == 1 and not alone):
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if processes() == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=IDLE_TIMEOUT)


def from_leader(compute: Callable[[], Value]) -> Value:
    """Return in all processes what rank zero computes, or raise its TrainerError. The value is pickled."""
    if processes() == 1:
        return compute()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome = [compute(), None]
        except TrainerError as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def tensors_from_leader(read: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return in all processes the tensors, on the CPU, that rank zero reads, or raise its TrainerError."""
    if processes() == 1:
        return dict(read())
    tensors: dict[str, torch.Tensor] = {}

    def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
        tensors.update(read())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    received = {}
    for name, (shape, dtype) in from_leader(shapes).items():
        tensor = tensors[name].contiguous() if rank() == 0 else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, src=0)
        received[name] = tensor
    return received


def gather(value: Value) -> list[Value]:
    """Return the values of all processes by rank. They are pickled."""
    if processes() == 1:
        return [value]
    values: list[Any] = [None] * processes()
    dist.all_gather_object(values, value)
    return values


def total(value: float) -> float:
    if processes() == 1:
        return value
    summed = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set every gradient to its mean over the processes; a parameter that one of them did not use counts as 0 there.

    All processes end with the same bits: they reduce one flat tensor.
    """
    if processes() == 1:
        return
    trained = list(parameters)
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])
    dist.all_reduce(flat)
    flat /= processes()
    for parameter, mean in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(mean.view_as(parameter))


# The base model over several processes: each has a copy, or a part of every tensor (FSDP2); and its gradients.
#
# With FSDP2 (torch's `fully_shard`) a process holds 1 / processes of weights, adapter and optimizer. It needs on top
# one decoder layer whole, at times two, and from the forward to the backward pass the last norm and the LM head, with
# the embedding if they are tied. Files are read by parts too (transformers' DistributedConfig), so that no process ever
# holds the whole model. The adapter is attached to an empty model first: fully_shard leaves out what comes after it.


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
        average_gradients(p for p in model.parameters() if p.requires_grad)


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
    return total(value) if sharded else value
