"""GPUs, as nvidia-smi tells them: is there room for vLLM, and if not, who holds the memory?

Asked before anything is started, since vLLM itself fails after a minute, and names nobody. Where nvidia-smi cannot be
asked nothing is said: vLLM will tell.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from ratchet.errors import GpuMemoryTooLow
from ratchet.trainer.settings.devices import VARIABLE

_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in MiB."""

    index: str
    uuid: str
    total: float
    used: float


def check_gpu_memory(devices: str | None, share: float) -> None:
    """Raise GpuMemoryTooLow where the first GPU that vLLM sees has less free memory than the share that vLLM will
    take.
    """
    seen = os.environ.get(VARIABLE) if devices is None else devices
    first = seen.split(",")[0].strip() if seen else "0"
    gpu = next((one for one in _gpus() if first == one.index or one.uuid.startswith(first)), None)
    if gpu is None or gpu.total - gpu.used >= share * gpu.total:
        return
    raise GpuMemoryTooLow(
        f"GPU {gpu.index} has {gpu.total - gpu.used:.0f} of {gpu.total:.0f} MiB free and vLLM takes {share:.0%} of it; "
        f"{_holders(gpu)}: end them, set vllm.devices to another GPU, or lower vllm.gpu_memory_utilization"
    )


def _gpus() -> list[Gpu]:
    rows = _ask("--query-gpu=index,uuid,memory.total,memory.used")
    try:
        return [Gpu(index, uuid, float(total), float(used)) for index, uuid, total, used in rows]
    except ValueError:  # a GPU that tells no numbers
        return []


def _holders(gpu: Gpu) -> str:
    rows = _ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    named = [f"pid {row[1]} ({row[2]}, {row[3]} MiB)" for row in rows if len(row) == 4 and row[0] == gpu.uuid]
    return f"it is held by {', '.join(named)}" if named else "who holds it cannot be seen from here"


def _ask(query: str) -> list[list[str]]:
    try:
        said = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_TIMEOUT,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in said.stdout.splitlines() if line.strip()]
