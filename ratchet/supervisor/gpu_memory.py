"""Which GPUs vLLM and the learner get where the settings do not say, and that base model, vLLM and learner fit them.

The GPUs are those that nvidia-smi lists. vLLM gets the first, as many as its tensor parallelism has, and the learner
the next, one for each of its processes. If there are not enough for both, or with one GPU, they share it. GPUs that the
user has named for one of them are left to it. A model without a memory formula passes with a note; so does a machine
whose GPUs cannot be listed.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace

from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.settings.setting_errors import listed
from ratchet.supervisor import vllm_command
from ratchet.trainer.errors import ModelDoesNotFit, ModelShapeUnknown
from ratchet.trainer.planning.memory import GIB, LearnerMemory, LearnerOption, learner_memory
from ratchet.trainer.planning.model_shape import read_config, read_shape
from ratchet.trainer.planning.plan import USABLE, GpuPlacement, MemorySplit, split_memory
from ratchet.trainer.settings.learner_settings import VARIABLE, LearnerProcessSettings

_NVIDIA_SMI_TIMEOUT = 20.0  # seconds
# Arguments with which vLLM uses other GPUs than `vllm.tensor_parallel_size` of them.
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
_MIB = 2**20
# Without a formula: half of a GPU that is shared, vLLM's own default of another.
_UNPLANNED_SHARED, _UNPLANNED = 0.5, 0.9
_FEW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in MiB."""

    index: str
    uuid: str
    total: float
    used: float


def check_gpu_memory(devices: str | None, share: float) -> None:
    """Raise CliError if vLLM's first GPU has less free memory than `share` of it, naming the processes on it."""
    gpu = next(iter(visible_gpus(devices)), None)
    if gpu is None or gpu.total - gpu.used >= share * gpu.total:
        return
    raise CliError(
        f"GPU {gpu.index} has {gpu.total - gpu.used:.0f} of {gpu.total:.0f} MiB free and vLLM takes {share:.0%} of it; "
        f"{_processes_on(gpu)}: end them, set vllm.devices to another GPU, or lower vllm.gpu_memory_utilization"
    )


def visible_gpus(devices: str | None) -> list[Gpu]:
    """Return the GPUs of a list in the format of CUDA_VISIBLE_DEVICES, in its order; None: of the variable, or all."""
    gpus = _gpus()
    visible = os.environ.get(VARIABLE) if devices is None else devices
    if visible is None:
        return gpus
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return [gpu for name in named for gpu in gpus if name == gpu.index or gpu.uuid.startswith(name)]


def _gpus() -> list[Gpu]:
    rows = _nvidia_smi("--query-gpu=index,uuid,memory.total,memory.used")
    try:
        return [Gpu(index, uuid, float(total), float(used)) for index, uuid, total, used in rows]
    except ValueError:  # a GPU that reports no numbers
        return []


def _processes_on(gpu: Gpu) -> str:
    rows = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    named = [f"pid {row[1]} ({row[2]}, {row[3]} MiB)" for row in rows if len(row) == 4 and row[0] == gpu.uuid]
    return f"it is used by {', '.join(named)}" if named else "the processes that use it are not visible from here"


def _nvidia_smi(query: str) -> list[list[str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
            timeout=_NVIDIA_SMI_TIMEOUT, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def assign_gpus(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings with `vllm.devices` and `learner.devices` filled in, and notes for the user."""
    process = settings.learner
    serving, training = settings.vllm.devices, process.devices
    both_named = serving is not None and training is not None
    parallel = any(argument.partition("=")[0] in _PARALLEL for argument in settings.vllm.extra_args)
    if not settings.has_judge or process.url is not None or both_named or parallel:
        return settings, ()
    gpus = visible_gpus(None)
    kept = [gpu for devices in (serving, training) if devices is not None for gpu in visible_gpus(devices)]
    free = [gpu for gpu in gpus if gpu not in kept]
    for_vllm = settings.vllm.tensor_parallel_size if serving is None else 0
    for_learner = process.num_processes if training is None else 0
    if len(free) < for_vllm + for_learner:
        return settings, ()
    serving = _names(free[:for_vllm]) if serving is None else serving
    training = _names(free[for_vllm : for_vllm + for_learner]) if training is None else training
    unused = free[for_vllm + for_learner :]
    changed = settings.changed(vllm={"devices": serving}, learner={"devices": training})
    note = f"GPUs: vLLM gets {serving}, the learner {training}"
    if unused:
        idle, every = listed(gpu.index for gpu in unused), process.num_processes + len(unused)
        note += f"; nothing uses {idle}: learner.num_processes: {every}, or vllm.tensor_parallel_size, would"
    return changed, (note,)


def _names(gpus: list[Gpu]) -> str:
    return ",".join(gpu.index for gpu in gpus)


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
    return learner_memory(
        shape, option, _FEW_TOKENS, rank=process.lora_r, target_modules=process.target_modules
    ).total  # fmt: skip


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
        max_loras=vllm_command.max_loras(settings),
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
