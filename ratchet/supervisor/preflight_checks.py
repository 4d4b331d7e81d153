"""Checks before anything starts: GPUs and their memory, the hub model's name, the adapter store, the judges, and the
base model of versions.

vLLM and the trainer would fail on the same problems, but minutes later and with longer messages. If a check cannot run
(no huggingface_hub, GPUs that cannot be listed, a model without a memory formula), it passes, with a note.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from ratchet.errors import CliError, SettingsError
from ratchet.settings.project_settings import Settings
from ratchet.settings.setting_errors import listed
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.records import BaseModel
from ratchet.store.store import Store
from ratchet.supervisor import vllm_command
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.adapters.base_model_files import bytes_to_read, digests, model_folder
from ratchet.trainer.errors import CheckpointError, ModelDoesNotFit, ModelShapeUnknown
from ratchet.trainer.planning.memory import GIB, LearnerMemory, LearnerOption, learner_memory
from ratchet.trainer.planning.model_shape import read_config, read_shape
from ratchet.trainer.planning.plan import USABLE, GpuPlacement, MemorySplit, split_memory
from ratchet.trainer.settings.learner_settings import VARIABLE, LearnerProcessSettings

# GPUs are those that nvidia-smi lists. Where the settings do not say, vLLM gets the first, as many as its tensor
# parallelism has, and the learner the next, one for each of its processes. If there are not enough for both, they share
# them. GPUs that the user has named for one of them are left to it.

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
    return GpuPlacement(
        gpu_bytes=round(min(gpu.total for gpu in (*serving, *training)) * _MIB),
        tensor_parallel_size=own.tensor_parallel_size,
        learner_gpus=len(training) * process.machines,
        shared=any(gpu in training for gpu in serving),
        gpu_memory_utilization=own.gpu_memory_utilization,
        max_model_len=own.max_model_len,
        max_loras=vllm_command.max_loras(settings),
        max_num_seqs=own.max_num_seqs,
        max_lora_rank=vllm_command.servable_rank(settings),
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


_HUB_TIMEOUT = 10.0  # seconds
_JUDGE_TIMEOUT = 120.0  # seconds; a judge may import large packages
_HUB_FILE = "config.json"
_MAKE_JUDGE = """
import json, os, sys
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
try:
    make_judge(read_spec(json.load(sys.stdin)), os.environ).close()
except TrainerError as error:
    sys.exit("ratchet: " + str(error))
"""
_DIGEST_CHARS = 12  # characters of a digest
_LARGE = 2_000_000_000  # bytes; reading more is announced


def check_adapter_store(settings: Settings) -> None:
    """Raise SettingsError if no version can be written to the adapter store that the settings name."""
    store = settings.adapters.store
    if store is None or not settings.has_judge:
        return
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


# The versions of a project's agents belong to the base model that will be served. Another one is rejected with a
# message that names both and the remedies. A project without a recorded base model records the one that it is started
# with, with a note. Files in the hub cache are read there; a model that is not yet downloaded is checked once vLLM has
# it.


def check_base_model(settings: Settings, store: Store, note: Callable[[str], None], *, serves: bool = False) -> bool:
    """Compare the base model with each agent's in the store; return whether its files could be read.

    `serves`: vLLM serves it already. Raises CliError.
    """
    model = vllm_command.check_model(settings.base_model)
    folder = model_folder(model)
    if folder is None:
        return False
    agents = [settings.for_agent(name) for name in settings.agents_by_name]
    files = _digests_of_all(agents, model, folder, note)
    for agent in agents:
        _check_agent(agent, store, model, files, note, serves=serves)
    return True


def _digests_of_all(
    agents: Sequence[Settings], model: str, folder: Path, note: Callable[[str], None]
) -> dict[str, str]:
    """Return the digests of the base model, which all agents share; each agent's trainer finds them cached."""
    caches = [agent.state.base_digests(agent.model) for agent in agents]
    cache = next((file for file in caches if file.is_file()), caches[0])
    if (size := bytes_to_read(folder, cache)) >= _LARGE:
        note(f"base model {model}: reading its {size / 1e9:.1f} GB of weights once, to compute their digests")
    files = digests(folder, cache)
    for other in caches:
        if other != cache and cache.is_file():
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cache, other)
    return files


def _check_agent(
    settings: Settings, store: Store, model: str, files: dict[str, str], note: Callable[[str], None], *, serves: bool
) -> None:
    """Compare the base model's digests with those of one agent's. Raises CliError."""
    known = store.base_models.base_model_of(settings.model)
    if known is not None and (parts := known.differing_parts(files)):
        if not store.base_models.clear_base_model(settings.model):
            raise CliError(mismatch_message(settings, store, known, model, files, parts))
        note(f"base model of {settings.model}: {model} replaces {known.name}, which nothing has run on yet")
        known = None
    unrecorded = known is None and (
        any(policy.version for policy in store.policies.all(settings.model))
        or bool(store.trajectories.page(1, chosen=TrajectoryFilter(alias=settings.model)))
    )
    store.base_models.register_base_model(settings.model, model, file_digests=files)
    if not serves:  # vLLM's options change its answers for the same files: the proxy records them again
        store.base_models.clear_base_model(settings.model, served_only=True)
    if unrecorded:
        weights = files["weights"][:_DIGEST_CHARS]
        note(f"base model: none was recorded for {settings.model}; it is now {model} (weights {weights})")


def mismatch_message(
    settings: Settings, store: Store, known: BaseModel, model: str, files: dict[str, str], parts: list[str]
) -> str:
    """Return the error message for a base model that the versions do not belong to."""
    alias, live = settings.model, store.policies.live().get(settings.model)
    newest = max((policy.version for policy in store.policies.all(alias)), default=0)
    versions = f"{alias}@0" if newest == 0 else f"{alias}@0 to {alias}@{newest}"
    serves = f", {alias}@{live.version} live," if live and newest else ""
    changed = ", ".join(
        f"{part} {known.file_digests[part][:_DIGEST_CHARS]}, now {files[part][:_DIGEST_CHARS]}" for part in parts
    )
    if settings.store is None:
        remedy = (
            "use another project for the new one (--project NAME), or start this one over: `ratchet down` and move "
            f"{settings.state.root} away"
        )
    else:
        remedy = "use another alias for the new one (--model NAME) or another --store"
    return (
        f"base_model: {versions}{serves} of project {settings.project} belong to {known.name}, and {model} is another "
        f"model ({changed}): adapters do not fit another base model, and scores cannot be compared. Go back to "
        f"{known.name}, {remedy}"
    )
