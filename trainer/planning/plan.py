"""Which settings fit which GPUs: the split between vLLM and learner, and the learner's settings.

Order of preference: the options of OPTIONS, cheapest in time first; then the most even split. On one GPU vLLM and
learner share its memory: the learner gets what its micro-batch needs, vLLM the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ratchet.trainer.errors import ModelDoesNotFit
from ratchet.trainer.planning.gpu_memory import (
    GIB,
    MAX_NUM_SEQS,
    LearnerMemory,
    LearnerOption,
    ServingMemory,
    learner_memory,
    serving_memory,
)
from ratchet.trainer.planning.model_shape import ModelShape, adapted_layers, count_lora_parameters, count_parameters

OPTIONS = (
    LearnerOption(),
    LearnerOption(gradient_checkpointing=True),
    LearnerOption(sharding="fsdp2", gradient_checkpointing=True),
    LearnerOption(gradient_checkpointing=True, activation_offload=True),
    LearnerOption(sharding="fsdp2", gradient_checkpointing=True, activation_offload=True),
    LearnerOption(quantization="nf4", gradient_checkpointing=True),
    LearnerOption(quantization="nf4", gradient_checkpointing=True, activation_offload=True),
)
USABLE = 0.92  # of a GPU's nominal memory; the rest is the driver's, and covers what the formulas do not
VLLM_SHARE = 0.92  # vLLM's own default of gpu_memory_utilization, for GPUs of its own
_LEAST_TOKENS, _MOST_TOKENS = 1024, 2**20
_LARGEST_BUDGET = 32768  # tokens per micro-batch; more are no faster
_MOST_GPUS = 512


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is planned for: GPUs of one kind, and the settings that the user has chosen.

    `context` is both vLLM's and the longest row's. `options` are the learner's settings to choose from.
    """

    gpus: int
    gpu_bytes: int
    context: int
    rank: int = 16
    target_modules: str | Sequence[str] = "all-linear"
    max_loras: int = 4
    max_num_seqs: int = MAX_NUM_SEQS
    options: tuple[LearnerOption, ...] = OPTIONS


@dataclass(frozen=True, slots=True)
class OptionFit:
    """A learner option on the learner's GPUs of a plan, and the longest row that fits; 0: none."""

    option: LearnerOption
    max_row_length: int
    memory: LearnerMemory  # at the context of the request
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings that fit, with the memory of each GPU."""

    shape: ModelShape
    request: PlanRequest
    parameters: int
    lora_parameters: int
    vllm_gpus: int  # the tensor-parallel size
    learner_gpus: int
    shared: bool  # vLLM and learner on the same GPU
    gpu_memory_utilization: float
    serving: ServingMemory
    kv_cache_bytes: int  # on each of vLLM's GPUs
    learner: OptionFit
    token_budget: int
    alternatives: tuple[OptionFit, ...]

    @property
    def concurrent_sequences(self) -> int:
        """Sequences of the whole context that vLLM's cache holds."""
        return self.kv_cache_bytes // self.serving.kv_cache_per_sequence


def make_plan(shape: ModelShape, request: PlanRequest) -> Plan:
    """Return the best plan. Raises ModelDoesNotFit, with the figures and the remedy."""
    found = _first_plan(shape, request)
    if found is None:
        raise ModelDoesNotFit(_why_not(shape, request))
    return found


def max_row_length(shape: ModelShape, option: LearnerOption, request: PlanRequest, gpus: int, capacity: int) -> int:
    """Return the most tokens of a micro-batch that fit into `capacity` bytes on each of the learner's GPUs; 0: none."""
    units = range(1, _MOST_TOKENS // _LEAST_TOKENS + 1)
    units_that_fit = bisect_right(
        units, capacity, key=lambda unit: _learner(shape, option, request, gpus, unit * _LEAST_TOKENS).total
    )
    return units_that_fit * _LEAST_TOKENS


def tensor_parallel_sizes(shape: ModelShape) -> Iterator[int]:
    """Yield the sizes that vLLM can split this model's attention by: powers of two that divide its heads."""
    size = 1
    while shape.heads % size == 0 and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0):
        yield size
        size *= 2


def _first_plan(shape: ModelShape, request: PlanRequest) -> Plan | None:
    if request.gpus == 1:
        return _shared(shape, request)
    splits = [size for size in tensor_parallel_sizes(shape) if size < request.gpus]
    splits.sort(key=lambda size: (abs(2 * size - request.gpus), size))
    for option in request.options:
        for vllm_gpus in splits:
            plan = _split(shape, request, option, vllm_gpus)
            if plan is not None:
                return plan
    return None


def _split(shape: ModelShape, request: PlanRequest, option: LearnerOption, vllm_gpus: int) -> Plan | None:
    """Return the plan with GPUs of their own for vLLM and learner; None if one of them does not fit."""
    serving = _serving(shape, request, vllm_gpus)
    cache = round(VLLM_SHARE * request.gpu_bytes) - serving.fixed
    gpus = request.gpus - vllm_gpus
    capacity = round(USABLE * request.gpu_bytes)
    if cache < serving.kv_cache_per_sequence:
        return None
    if _learner(shape, option, request, gpus, request.context).total > capacity:
        return None
    fit = _fit(shape, option, request, gpus, capacity)
    return _plan(shape, request, vllm_gpus, gpus, False, VLLM_SHARE, serving, cache, fit, capacity)


def _shared(shape: ModelShape, request: PlanRequest) -> Plan | None:
    """Return the plan for one GPU; None if vLLM and learner do not fit together."""
    serving = _serving(shape, request, 1)
    usable = round(USABLE * request.gpu_bytes)
    capacity = usable - serving.least
    for option in request.options:
        if option.sharding != "none":
            continue
        if _learner(shape, option, request, 1, request.context).total <= capacity:
            fit = _fit(shape, option, request, 1, capacity)
            share = int(100 * (usable - fit.memory.total) / request.gpu_bytes) / 100
            cache = int(share * request.gpu_bytes) - serving.fixed
            if cache >= serving.kv_cache_per_sequence:
                return _plan(shape, request, 1, 1, True, share, serving, cache, fit, fit.memory.total)
    return None


def _plan(
    shape: ModelShape,
    request: PlanRequest,
    vllm_gpus: int,
    gpus: int,
    shared: bool,
    share: float,
    serving: ServingMemory,
    cache: int,
    fit: OptionFit,
    capacity: int,
) -> Plan:
    own = capacity if not shared else round(USABLE * request.gpu_bytes) - serving.least
    usable = [option for option in request.options if option.sharding == "none" or gpus > 1]
    most = max_row_length(shape, fit.option, request, gpus, capacity)
    return Plan(
        shape=shape,
        request=request,
        parameters=count_parameters(shape).total,
        lora_parameters=count_lora_parameters(adapted_layers(shape, request.target_modules), request.rank),
        vllm_gpus=vllm_gpus,
        learner_gpus=gpus,
        shared=shared,
        gpu_memory_utilization=share,
        serving=serving,
        kv_cache_bytes=cache,
        learner=fit,
        token_budget=max(request.context, min(most, _LARGEST_BUDGET)),
        alternatives=tuple(_fit(shape, option, request, gpus, own) for option in usable),
    )


def _fit(shape: ModelShape, option: LearnerOption, request: PlanRequest, gpus: int, capacity: int) -> OptionFit:
    memory = _learner(shape, option, request, gpus, request.context)
    return OptionFit(option, max_row_length(shape, option, request, gpus, capacity), memory, memory.total <= capacity)


def _learner(shape: ModelShape, option: LearnerOption, request: PlanRequest, gpus: int, tokens: int) -> LearnerMemory:
    return learner_memory(
        shape, option, tokens, gpus=gpus, rank=request.rank, target_modules=request.target_modules
    )  # fmt: skip


def _serving(shape: ModelShape, request: PlanRequest, tensor_parallel: int) -> ServingMemory:
    return serving_memory(
        shape, request.context, tensor_parallel=tensor_parallel, gpu_bytes=request.gpu_bytes,
        max_loras=request.max_loras, rank=request.rank, max_num_seqs=request.max_num_seqs,
        target_modules=request.target_modules,
    )  # fmt: skip


def _why_not(shape: ModelShape, request: PlanRequest) -> str:
    gib = request.gpu_bytes / GIB
    sizes = [size for size in tensor_parallel_sizes(shape) if size < max(2, request.gpus)]
    serving = _serving(shape, request, max(sizes))
    gpus = max(1, request.gpus - max(sizes))
    options = [option for option in request.options if option.sharding == "none" or gpus > 1]
    option = min(options, key=lambda one: _learner(shape, one, request, gpus, request.context).total)
    learner = _learner(shape, option, request, gpus, request.context)
    here = f"{request.gpus} GPU(s) of {gib:.3g} GiB" + (", which they share" if request.gpus == 1 else "")
    remedies = [*_shorter(shape, request), *_more_gpus(shape, request), "take a smaller model"]
    return (
        f"the model does not fit on {here}: {serving_figures(serving, request.context)} on {max(sizes)} GPU(s), and "
        f"{learner_figures(learner)} on {gpus} with {option}; {', or '.join(remedies)}"
    )


def serving_figures(serving: ServingMemory, context: int) -> str:
    """Return what vLLM needs, as a clause."""
    return (
        f"vLLM needs {serving.least / GIB:.1f} GiB a GPU (weights {serving.weights / GIB:.1f}, KV cache of one "
        f"sequence of {context} tokens {serving.kv_cache_per_sequence / GIB:.1f})"
    )


def learner_figures(learner: LearnerMemory) -> str:
    """Return what the learner needs, as a clause."""
    return (
        f"the learner {learner.total / GIB:.1f} GiB a GPU (weights {learner.weights / GIB:.1f}, activations "
        f"{learner.activations / GIB:.1f})"
    )


def _shorter(shape: ModelShape, request: PlanRequest) -> Iterator[str]:
    """Yield the longest context that fits."""
    context = request.context // 2
    while context >= _LEAST_TOKENS:
        if _first_plan(shape, replace(request, context=context)):
            yield f"plan for a context of {context} tokens, which fits"
            return
        context //= 2


def _more_gpus(shape: ModelShape, request: PlanRequest) -> Iterator[str]:
    """Yield the least number of such GPUs on which it fits."""
    gpus = request.gpus + 1
    while gpus <= _MOST_GPUS:
        if _first_plan(shape, replace(request, gpus=gpus)):
            yield f"use {gpus} such GPUs"
            return
        gpus += max(1, gpus // 4)
