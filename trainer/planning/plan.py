"""Which settings fit which GPUs: a project's own settings, and those that `ratchet plan` chooses.

`split_memory` takes a project's settings as they are. What the user left open follows: vLLM's share of the GPU, and its
context if the model's own does not fit. `make_plan` tries placements in an order of preference: the options of OPTIONS,
cheapest in time first; then the most even split of the GPUs. On one GPU vLLM and learner share its memory: the learner
gets what its micro-batch needs, vLLM the rest. What cannot fit is refused with the figures and a change that fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ratchet.trainer.errors import ModelDoesNotFit
from ratchet.trainer.planning.memory import (
    GIB,
    MAX_LORAS,
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
_LONG_ROW = 32768  # tokens; of longer rows the learner finds by trial what fits
_LEAST_CONTEXT = 4096
_MOST_GPUS = 512


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """GPUs and the settings that decide their memory, under their names in ratchet.yaml.

    `learner_gpus` is 0 if nothing is trained here. `shared`: vLLM and learner have a GPU in common.
    """

    gpu_bytes: int  # of the smallest GPU
    tensor_parallel_size: int
    learner_gpus: int
    shared: bool
    max_model_len: int | None
    token_budget: int
    max_length: int | None
    option: LearnerOption
    gpu_memory_utilization: float | None = None
    max_loras: int = MAX_LORAS
    max_num_seqs: int = MAX_NUM_SEQS
    max_lora_rank: int = 16
    lora_r: int = 16
    target_modules: str | Sequence[str] = "all-linear"

    def learner(self, shape: ModelShape, tokens: int) -> LearnerMemory:
        """Return the learner's memory while it trains a micro-batch of `tokens` tokens."""
        return learner_memory(
            shape, self.option, tokens, gpus=self.learner_gpus, rank=self.lora_r, target_modules=self.target_modules
        )

    def serving(self, shape: ModelShape, context: int) -> ServingMemory:
        return serving_memory(
            shape, context, tensor_parallel=self.tensor_parallel_size, gpu_bytes=self.gpu_bytes,
            max_loras=self.max_loras, rank=self.max_lora_rank, max_num_seqs=self.max_num_seqs,
            target_modules=self.target_modules,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """What follows for vLLM; `learner` is None if nothing is trained here."""

    gpu_memory_utilization: float
    max_model_len: int | None  # None: the model's own
    serving: ServingMemory
    learner: LearnerMemory | None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is planned for: GPUs of one kind, the longest row, which is vLLM's context too, and the adapter's rank."""

    gpus: int
    gpu_bytes: int
    context: int
    rank: int = 16


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


def split_memory(shape: ModelShape, placement: GpuPlacement) -> MemorySplit:
    """Return the split of the GPUs' memory. Raises ModelDoesNotFit, with the figures and a remedy."""
    found = _split(shape, placement)
    if found is None:
        raise ModelDoesNotFit(_why_no_split(shape, placement))
    return found


def _split(shape: ModelShape, placement: GpuPlacement) -> MemorySplit | None:
    for context in _contexts(shape, placement):
        serving = placement.serving(shape, context)
        for learner in _learners(shape, placement, context):
            share = _share(placement, learner)
            if share is not None and serving.least <= share * placement.gpu_bytes:
                chosen = placement.max_model_len or (None if context == shape.max_positions else context)
                return MemorySplit(share, chosen, serving, learner)
    return None


def _share(placement: GpuPlacement, learner: LearnerMemory | None) -> float | None:
    """Return vLLM's share of a GPU beside this learner; None if there is none."""
    usable = USABLE * placement.gpu_bytes
    own = placement.gpu_memory_utilization
    if learner is None or not placement.shared:
        fits = learner is None or learner.total <= usable
        return (own or VLLM_SHARE) if fits else None
    left = int(100 * (usable - learner.total) / placement.gpu_bytes) / 100
    if own is None:
        return left if left > 0 else None
    return own if own <= left else None


def _contexts(shape: ModelShape, placement: GpuPlacement) -> Iterator[int]:
    """Yield contexts of vLLM to try: the chosen one, or the model's own and shorter ones."""
    context = placement.max_model_len or shape.max_positions
    yield context
    while placement.max_model_len is None and context // 2 >= _LEAST_CONTEXT:
        context //= 2
        yield context


def _learners(shape: ModelShape, placement: GpuPlacement, context: int) -> Iterator[LearnerMemory | None]:
    """Yield the learner's memory with rows as long as the context if they fit, else with its token budget."""
    if not placement.learner_gpus:
        yield None
        return
    least = max(placement.token_budget, min(placement.max_length or 0, context))
    most = max(least, min(context, _LONG_ROW)) if placement.max_length is None and placement.shared else least
    for tokens in dict.fromkeys((most, least)):
        yield placement.learner(shape, tokens)


def _why_no_split(shape: ModelShape, placement: GpuPlacement) -> str:
    context = list(_contexts(shape, placement))[-1]
    needs = _serving_figures(placement.serving(shape, context), context)
    learner = list(_learners(shape, placement, context))[-1]
    needs += f", and {_learner_figures(learner)} for {placement.token_budget} tokens" if learner else ""
    shared = ", which they share" if placement.shared and learner else ""
    own = placement.gpu_memory_utilization
    given = f" (vllm.gpu_memory_utilization gives vLLM {own * placement.gpu_bytes / GIB:.1f})" if own else ""
    remedies = [text for changed, text in _changes(placement) if _split(shape, changed)][:2]
    remedy = ", or ".join([*remedies, "take a smaller model or larger GPUs (`ratchet plan`)"])
    return f"base_model does not fit on GPUs of {placement.gpu_bytes / GIB:.0f} GiB{shared}: {needs}{given}; {remedy}"


def _changes(placement: GpuPlacement) -> Iterator[tuple[GpuPlacement, str]]:
    """Yield changed settings with the words for them, the least change first."""
    if placement.gpu_memory_utilization is not None:
        yield replace(placement, gpu_memory_utilization=None), "leave out vllm.gpu_memory_utilization"
    if placement.max_model_len is not None:
        yield replace(placement, max_model_len=None), "leave out vllm.max_model_len, or lower it"
    if placement.max_length is not None:
        yield replace(placement, max_length=None), "leave out learner.max_length, or lower it"
    if placement.token_budget > _LEAST_CONTEXT:
        yield replace(placement, token_budget=_LEAST_CONTEXT), f"set learner.token_budget: {_LEAST_CONTEXT}"
    for option in _possible(placement.learner_gpus):
        changes = _changed(placement.option, option)
        if changes:
            option = replace(option, share_prefixes=placement.option.share_prefixes)
            yield replace(placement, option=option), f"set {', '.join(changes)}"
            smallest = replace(placement, option=option, token_budget=_LEAST_CONTEXT, max_length=None)
            yield smallest, f"set {', '.join(changes)}, learner.token_budget: {_LEAST_CONTEXT}"


def _changed(own: LearnerOption, option: LearnerOption) -> list[str]:
    """Return the settings of `option` that save memory and are not set yet."""
    names = ("sharding", "gradient_checkpointing", "activation_offload", "quantization")
    differing = [name for name in names if getattr(own, name) != getattr(option, name)]
    values = {name: str(getattr(option, name)).lower() for name in differing}
    return [] if "none" in values.values() or "false" in values.values() else [
        f"learner.{name}: {value}" for name, value in values.items()
    ]  # fmt: skip


def _possible(learner_gpus: int) -> list[LearnerOption]:
    return [option for option in OPTIONS if learner_gpus and (option.sharding == "none" or learner_gpus > 1)]


def make_plan(shape: ModelShape, request: PlanRequest) -> Plan:
    """Return the best plan. Raises ModelDoesNotFit, with the figures and the remedy."""
    found = _first_fit(shape, request)
    if found is None:
        raise ModelDoesNotFit(_why_no_plan(shape, request))
    placement, split = found
    usable = round(USABLE * request.gpu_bytes)
    capacity = usable - split.serving.least if placement.shared else usable
    options = _possible(placement.learner_gpus)
    fits = tuple(_fit(shape, replace(placement, option=option), capacity) for option in options)
    learner = fits[options.index(placement.option)]
    most = 0 if placement.shared else min(learner.max_row_length, _LARGEST_BUDGET)
    return Plan(
        shape=shape,
        request=request,
        parameters=count_parameters(shape).total,
        lora_parameters=count_lora_parameters(adapted_layers(shape), request.rank),
        vllm_gpus=placement.tensor_parallel_size,
        learner_gpus=placement.learner_gpus,
        shared=placement.shared,
        gpu_memory_utilization=split.gpu_memory_utilization,
        serving=split.serving,
        kv_cache_bytes=int(split.gpu_memory_utilization * request.gpu_bytes) - split.serving.fixed,
        learner=learner,
        token_budget=max(request.context, most),
        alternatives=fits,
    )


def tensor_parallel_sizes(shape: ModelShape) -> Iterator[int]:
    """Yield the sizes that vLLM can split this model's attention by: powers of two that divide its heads."""
    size = 1
    while shape.heads % size == 0 and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0):
        yield size
        size *= 2


def _first_fit(shape: ModelShape, request: PlanRequest) -> tuple[GpuPlacement, MemorySplit] | None:
    for placement in _placements(shape, request):
        split = _split(shape, placement)
        if split is not None:
            return placement, split
    return None


def _placements(shape: ModelShape, request: PlanRequest) -> Iterator[GpuPlacement]:
    """Yield placements in the order of preference."""
    sizes = [size for size in tensor_parallel_sizes(shape) if size < max(2, request.gpus)]
    sizes.sort(key=lambda size: (abs(2 * size - request.gpus), size))
    for option in OPTIONS:
        for vllm_gpus in sizes:
            learner_gpus = max(1, request.gpus - vllm_gpus)
            if option in _possible(learner_gpus):
                yield GpuPlacement(
                    request.gpu_bytes, vllm_gpus, learner_gpus, request.gpus == 1, request.context, request.context,
                    request.context, option, max_lora_rank=request.rank, lora_r=request.rank,
                )  # fmt: skip


def _fit(shape: ModelShape, placement: GpuPlacement, capacity: int) -> OptionFit:
    """Return whether a row of the whole context fits into `capacity` bytes on each of the learner's GPUs."""
    units = range(1, _MOST_TOKENS // _LEAST_TOKENS + 1)
    fitting = bisect_right(units, capacity, key=lambda unit: placement.learner(shape, unit * _LEAST_TOKENS).total)
    memory = placement.learner(shape, placement.token_budget)
    return OptionFit(placement.option, fitting * _LEAST_TOKENS, memory, memory.total <= capacity)


def _why_no_plan(shape: ModelShape, request: PlanRequest) -> str:
    last = max(_placements(shape, request), key=lambda placement: placement.tensor_parallel_size)
    placements = [replace(last, option=option) for option in _possible(last.learner_gpus)]
    placement = min(placements, key=lambda one: one.learner(shape, request.context).total)
    learner = placement.learner(shape, request.context)
    here = f"{request.gpus} GPU(s) of {request.gpu_bytes / GIB:.3g} GiB"
    here += ", which they share" if placement.shared else ""
    remedies = [*_shorter(shape, request), *_more_gpus(shape, request), "take a smaller model"]
    serving = _serving_figures(placement.serving(shape, request.context), request.context)
    return (
        f"the model does not fit on {here}: {serving} on {placement.tensor_parallel_size} GPU(s), and "
        f"{_learner_figures(learner)} on {placement.learner_gpus} with {placement.option}; {', or '.join(remedies)}"
    )


def _serving_figures(serving: ServingMemory, context: int) -> str:
    return (
        f"vLLM needs {serving.least / GIB:.1f} GiB a GPU (weights {serving.weights / GIB:.1f}, KV cache of one "
        f"sequence of {context} tokens {serving.kv_cache_per_sequence / GIB:.1f})"
    )


def _learner_figures(learner: LearnerMemory) -> str:
    return (
        f"the learner {learner.total / GIB:.1f} GiB a GPU (weights {learner.weights / GIB:.1f}, activations "
        f"{learner.activations / GIB:.1f})"
    )


def _shorter(shape: ModelShape, request: PlanRequest) -> Iterator[str]:
    """Yield the longest context that fits."""
    context = request.context // 2
    while context >= _LEAST_TOKENS:
        if _first_fit(shape, replace(request, context=context)):
            yield f"plan for a context of {context} tokens, which fits"
            return
        context //= 2


def _more_gpus(shape: ModelShape, request: PlanRequest) -> Iterator[str]:
    """Yield the least number of such GPUs on which it fits."""
    gpus = request.gpus + 1
    while gpus <= _MOST_GPUS:
        if _first_fit(shape, replace(request, gpus=gpus)):
            yield f"use {gpus} such GPUs"
            return
        gpus += max(1, gpus // 4)
