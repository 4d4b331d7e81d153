"""Checks before anything is loaded that base model, vLLM and learner fit their GPUs, and splits one that they share.

The GPUs are those that nvidia-smi lists. A model without a memory formula passes with a note; so does a machine whose
GPUs cannot be listed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.supervisor import vllm_command
from ratchet.supervisor.adapter_slots import max_loras
from ratchet.supervisor.gpu_assignment import assign_gpus
from ratchet.supervisor.preflight_checks import Gpu, visible_gpus
from ratchet.trainer.errors import ModelDoesNotFit, ModelShapeUnknown
from ratchet.trainer.planning.memory import GIB, LearnerMemory, LearnerOption, learner_memory
from ratchet.trainer.planning.model_shape import read_config, read_shape
from ratchet.trainer.planning.plan import USABLE, GpuPlacement, MemorySplit, split_memory
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings

_MIB = 2**20
# Without a formula: half of a GPU that is shared, vLLM's own default of another.
_UNPLANNED_SHARED, _UNPLANNED = 0.5, 0.9
_FEW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Settings with vLLM's share of the GPU and its context filled in, and notes for the user."""

    settings: Settings
    notes: tuple[str, ...] = ()
    learner: LearnerMemory | None = None  # None: nothing is trained here, or there is no formula
    shared: bool = False  # vLLM and the learner have a GPU in common


def plan_memory(settings: Settings) -> PlannedMemory:
    """Return the settings with GPUs, and vLLM's share of its own. Raises CliError if the model cannot fit."""
    settings, notes = assign_gpus(settings)
    process = settings.learner
    serving = visible_gpus(settings.vllm.devices)[: settings.vllm.tensor_parallel_size]
    trains = settings.has_judge and process.url is None  # else the learner has GPUs elsewhere
    training = visible_gpus(settings.learner.devices)[: process.num_processes] if trains else []
    shared = any(gpu in training for gpu in serving) if serving else trains
    try:
        if not serving:
            raise ModelShapeUnknown("nvidia-smi lists no GPU of vLLM's")
        shape = read_shape(read_config(vllm_command.check_model(settings.base_model)))
        split = split_memory(shape, _placement(settings, process, serving, training))
    except ModelShapeUnknown as reason:
        share = settings.vllm.gpu_memory_utilization or (_UNPLANNED_SHARED if shared else _UNPLANNED)
        planned = _with(settings, share, None, 1 - share if shared else None)
        return PlannedMemory(planned, (*notes, f"memory is not planned: {reason}"), shared=shared)
    except ModelDoesNotFit as error:
        raise CliError(str(error)) from error
    share = split.gpu_memory_utilization
    planned = _with(settings, share, split.max_model_len, USABLE - share if shared and split.learner else None)
    return PlannedMemory(planned, (*notes, *_notes(settings, split, shared)), split.learner, shared)


def smallest_learner(settings: Settings) -> int | None:
    """Return the bytes of GPU memory that a learner of one process needs at least; None without a formula."""
    process = settings.learner
    try:
        shape = read_shape(read_config(vllm_command.check_model(settings.base_model)))
    except ModelShapeUnknown:
        return None
    option = replace(_option(process), sharding="none")
    memory = learner_memory(
        shape, option, _FEW_TOKENS, rank=process.lora_r, target_modules=process.target_modules
    )  # fmt: skip
    return memory.total


def free_learner_memory(settings: Settings) -> int | None:
    """Return the free bytes of the learner's first GPU; None if nvidia-smi does not list it."""
    gpu = next(iter(visible_gpus(settings.learner.devices)), None)
    return None if gpu is None else round((gpu.total - gpu.used) * _MIB)


def _with(settings: Settings, share: float, max_model_len: int | None, learner: float | None) -> Settings:
    """Return the settings with vLLM's share and context, and the learner's share of a GPU that they have in common."""
    changes = {"gpu_memory_utilization": share, "max_model_len": max_model_len or settings.vllm.max_model_len}
    if learner is None or learner <= 0 or settings.learner.gpu_memory_utilization is not None:
        return settings.changed(vllm=changes)
    return settings.changed(vllm=changes, learner={"gpu_memory_utilization": round(learner, 2)})


def _placement(
    settings: Settings, process: LearnerProcessSettings, serving: list[Gpu], training: list[Gpu]
) -> GpuPlacement:
    own = settings.vllm
    rank = own.max_lora_rank or vllm_command.servable_rank(settings)
    return GpuPlacement(
        gpu_bytes=round(min(gpu.total for gpu in (*serving, *training)) * _MIB),
        tensor_parallel_size=own.tensor_parallel_size,
        learner_gpus=len(training) * process.machines,
        shared=any(gpu in training for gpu in serving),
        gpu_memory_utilization=own.gpu_memory_utilization,
        max_model_len=own.max_model_len,
        max_loras=max_loras(settings),
        max_num_seqs=own.max_num_seqs,
        max_lora_rank=rank,
        lora_r=process.lora_r,
        target_modules=process.target_modules,
        token_budget=process.token_budget,
        max_length=settings.trainer.learner.max_length,
        option=_option(process),
    )


def _option(process: LearnerProcessSettings) -> LearnerOption:
    return LearnerOption(
        sharding=process.sharding,
        gradient_checkpointing=process.gradient_checkpointing is not False,
        activation_offload=process.activation_offload,
        quantization=process.quantization,
        share_prefixes=process.share_prefixes,
    )


def _notes(settings: Settings, split: MemorySplit, shared: bool) -> list[str]:
    notes = []
    if split.learner is not None and shared and settings.vllm.gpu_memory_utilization is None:
        notes.append(
            f"GPU memory: vLLM gets {split.gpu_memory_utilization:.0%}, the learner needs "
            f"{split.learner.total / GIB:.1f} GiB"
        )
    if split.max_model_len and settings.vllm.max_model_len is None:
        notes.append(f"vllm.max_model_len: {split.max_model_len}, which fits into the GPU's memory")
    return notes
