"""Which GPUs vLLM and the learner get on a machine with several, where the settings do not say.

vLLM gets the first GPUs, as many as its tensor parallelism has, and the learner the next, one for each of its
processes. If there are not enough for both, or with one GPU, they share as `memory_checks.py` plans. GPUs that the user
has named for one of them are left to it.
"""

from __future__ import annotations

from ratchet.settings.project_settings import Settings
from ratchet.settings.setting_errors import listed
from ratchet.supervisor.preflight_checks import Gpu, visible_gpus

# Arguments with which vLLM uses other GPUs than `vllm.tensor_parallel_size` of them.
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")


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
    return changed, (_note(serving, training, unused, process.num_processes),)


def _note(serving: str, training: str, unused: list[Gpu], processes: int) -> str:
    note = f"GPUs: vLLM gets {serving}, the learner {training}"
    if not unused:
        return note
    idle = listed(gpu.index for gpu in unused)
    every = processes + len(unused)
    return f"{note}; nothing uses {idle}: learner.num_processes: {every}, or vllm.tensor_parallel_size, would"


def _names(gpus: list[Gpu]) -> str:
    return ",".join(gpu.index for gpu in gpus)
