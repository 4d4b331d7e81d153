"""The training processes of a learner: what they tell each other, and the gradients of a model that is not sharded.

Every process runs the same operations with the same rows. Rank zero alone reads and writes files; what it reads, or the
error that it has, reaches the others. The processes are those of torchrun's or `accelerate launch`'s variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ratchet.trainer.errors import TrainerError
from ratchet.trainer.learner.launch import IDLE_TIMEOUT, local_rank, processes, rank

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


def tensors_from_leader(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return rank zero's tensors, on the CPU, in all processes; the others pass none."""
    if processes() == 1:
        return dict(tensors)
    shapes = from_leader(lambda: {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    received = {}
    for name, (shape, dtype) in shapes.items():
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
    """Return the sum of the values of all processes."""
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
