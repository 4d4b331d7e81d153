"""Checks before anything starts: free GPU memory, the hub model's name, the judge, and the adapter store.

vLLM and the trainer would fail on the same problems, but minutes later and with longer messages. If a check cannot run
(no nvidia-smi, no huggingface_hub), it passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.errors import CliError, SettingsError
from ratchet.settings.project_settings import Settings
from ratchet.trainer.settings.learner_settings import VARIABLE

_NVIDIA_SMI_TIMEOUT = 20.0  # seconds
_HUB_TIMEOUT = 10.0  # seconds
_JUDGE_TIMEOUT = 120.0  # seconds; a judge may import large packages
_HUB_FILE = "config.json"
_MAKE_JUDGE = """
import json, os, sys
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
try:
    make_judge(read_spec(json.load(sys.stdin)), os.environ).close()
except TrainerError as error:
    sys.exit("ratchet: " + str(error))
"""


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


def check_adapter_store(settings: Settings) -> None:
    """Raise SettingsError if no version can be written to the adapter store that the settings name."""
    store = settings.adapters.store
    if store is None or not settings.has_judge:
        return
    from ratchet.trainer.adapters.adapter_store import AdapterStore
    from ratchet.trainer.errors import CheckpointError

    try:
        AdapterStore(settings.state.adapter_cache).check(store)
    except CheckpointError as error:
        raise SettingsError(str(error)) from error


def check_hub_model(name: str) -> None:
    """Raise CliError, with the remedy, if neither the local hub cache nor the hub has a model of this name.

    The hub is asked once for config.json. HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and HF_HOME apply.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return
    try:
        if isinstance(try_to_load_from_cache(name, _HUB_FILE), str):
            return
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise CliError(f"base model {name}: neither a folder nor a hub name: {reason}") from error
    if constants.HF_HUB_OFFLINE:
        problem = "not in the local hub cache, and HF_HUB_OFFLINE is set: download it, or name a folder"
    else:
        problem = _ask_hub(name, constants.ENDPOINT)
    if problem:
        raise CliError(f"base model {name}: no such folder; as a hub name it is {problem}")


def _ask_hub(name: str, hub: str) -> str:
    """Return what is wrong with a name on the hub; empty if nothing is."""
    import httpx
    from huggingface_hub import get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        # A redirect leads to the file, so the file exists.
        answer = httpx.head(f"{hub}/{name}/resolve/main/{_HUB_FILE}", headers=headers, timeout=_HUB_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"not in the local hub cache, and {hub} cannot be reached ({type(error).__name__}): name a folder"
    if answer.status_code < 400:
        return ""
    code = answer.headers.get("x-error-code", "")
    if code == "GatedRepo":
        return f"gated: accept its terms at {hub}/{name} and set HF_TOKEN"
    if code == "EntryNotFound":
        return f"a repository on {hub} without {_HUB_FILE}: name a model that vLLM can load"
    if answer.status_code in (401, 403, 404):
        return f"no model on {hub}: correct the name, or set HF_TOKEN if it is private"
    return f"not confirmed: {hub} answered {answer.status_code}; try again later, or name a folder"


def check_judges(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raise SettingsError if the trainer could not create the judge of an agent.

    Runs in a process of its own: the user's code is never imported into the supervisor.
    """
    checked: dict[str, str] = {}  # the first agent with a judge, by its specification
    for name, agent in settings.agents_by_name.items():
        if agent.has_judge:
            key = f"agents.{name}.judge" if settings.agents else "trainer.judge"
            checked.setdefault(agent.judge.model_dump_json(), key)
    for spec, key in checked.items():
        _check_judge(spec, key, environ)


def _check_judge(spec: str, key: str, environ: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MAKE_JUDGE], input=spec, capture_output=True, text=True,
            timeout=_JUDGE_TIMEOUT, env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SettingsError(
            f"{key}: creating it took longer than {_JUDGE_TIMEOUT:g} s: what does it import?"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SettingsError(f"{key}: {last.removeprefix('ratchet: ')}")
