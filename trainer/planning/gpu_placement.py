"""Whether a project's own settings fit its GPUs, and how vLLM and learner share one.

`plan.py` chooses settings; this takes them as they are. What the user left open follows: vLLM's share of the GPU, and
its context if the model's own does not fit. What cannot fit is refused with the figures and a change that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ratchet.trainer.errors import ModelDoesNotFit
from ratchet.trainer.planning.gpu_memory import (
    GIB,
    LearnerMemory,
    LearnerOption,
    ServingMemory,
    learner_memory,
    serving_memory,
)
from ratchet.trainer.planning.model_shape import ModelShape
from ratchet.trainer.planning.plan import OPTIONS, USABLE, VLLM_SHARE, learner_figures, serving_figures

_LONG_ROW = 32768  # tokens; of longer rows the learner finds by trial what fits
_LEAST_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """The GPUs of a project and the settings that decide their memory, under their names in ratchet.yaml.

    `learner_gpus` is 0 if nothing is trained here. `shared`: vLLM and learner have a GPU in common.
    """

    gpu_bytes: int  # of the smallest GPU
    tensor_parallel_size: int
    learner_gpus: int
    shared: bool
    gpu_memory_utilization: float | None
    max_model_len: int | None
    max_loras: int
    max_num_seqs: int
    max_lora_rank: int
    lora_r: int
    target_modules: str | Sequence[str]
    token_budget: int
    max_length: int | None
    option: LearnerOption


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """What follows for vLLM; `learner` is None if nothing is trained here."""

    gpu_memory_utilization: float
    max_model_len: int | None  # None: the model's own
    context: int
    serving: ServingMemory
    learner: LearnerMemory | None


def split_memory(shape: ModelShape, placement: GpuPlacement) -> MemorySplit:
    """Return the split of the GPUs' memory. Raises ModelDoesNotFit, with the figures and a remedy."""
    found = _split(shape, placement)
    if found is None:
        raise ModelDoesNotFit(_why_not(shape, placement))
    return found


def _split(shape: ModelShape, placement: GpuPlacement) -> MemorySplit | None:
    for context in _contexts(shape, placement):
        serving = _serving(shape, placement, context)
        for learner in _learners(shape, placement, context):
            share = _share(placement, learner)
            if share is not None and serving.least <= share * placement.gpu_bytes:
                chosen = placement.max_model_len or (None if context == shape.max_positions else context)
                return MemorySplit(share, chosen, context, serving, learner)
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
        yield learner_memory(
            shape, placement.option, tokens, gpus=placement.learner_gpus, rank=placement.lora_r,
            target_modules=placement.target_modules,
        )  # fmt: skip


def _serving(shape: ModelShape, placement: GpuPlacement, context: int) -> ServingMemory:
    return serving_memory(
        shape, context, tensor_parallel=placement.tensor_parallel_size, gpu_bytes=placement.gpu_bytes,
        max_loras=placement.max_loras, rank=placement.max_lora_rank, max_num_seqs=placement.max_num_seqs,
        target_modules=placement.target_modules,
    )  # fmt: skip


def _why_not(shape: ModelShape, placement: GpuPlacement) -> str:
    context = list(_contexts(shape, placement))[-1]
    needs = serving_figures(_serving(shape, placement, context), context)
    learner = list(_learners(shape, placement, context))[-1]
    needs += f", and {learner_figures(learner)} for {placement.token_budget} tokens" if learner else ""
    shared = ", which they share" if placement.shared and learner else ""
    own = placement.gpu_memory_utilization
    given = f" (vllm.gpu_memory_utilization gives vLLM {own * placement.gpu_bytes / GIB:.1f})" if own else ""
    remedies = [text for changed, text in _changes(shape, placement) if _split(shape, changed)][:2]
    remedy = ", or ".join([*remedies, "take a smaller model or larger GPUs (`ratchet plan`)"])
    return f"base_model does not fit on GPUs of {placement.gpu_bytes / GIB:.0f} GiB{shared}: {needs}{given}; {remedy}"


def _changes(shape: ModelShape, placement: GpuPlacement) -> Iterator[tuple[GpuPlacement, str]]:
    """Yield changed settings with the words for them, the least change first."""
    if placement.gpu_memory_utilization is not None:
        yield replace(placement, gpu_memory_utilization=None), "leave out vllm.gpu_memory_utilization"
    if placement.max_model_len is not None:
        yield replace(placement, max_model_len=None), "leave out vllm.max_model_len, or lower it"
    if placement.max_length is not None:
        yield replace(placement, max_length=None), "leave out learner.max_length, or lower it"
    if placement.token_budget > _LEAST_CONTEXT:
        yield replace(placement, token_budget=_LEAST_CONTEXT), f"set learner.token_budget: {_LEAST_CONTEXT}"
    own_trees = placement.option.share_prefixes
    for option in [replace(one, share_prefixes=own_trees) for one in OPTIONS] if placement.learner_gpus else ():
        changes = _changed(placement.option, option)
        if changes and (option.sharding == "none" or placement.learner_gpus > 1):
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
