"""Which of vLLM's parsers read a model's tool calls and its reasoning.

Both follow from the markup in the model's own chat template, and from the tokens that vLLM demands of the tokenizer
before it starts. Where none fits, none is used, and a note says why and names the setting: a wrong parser ends vLLM, or
puts whole answers where clients do not look. A parser that the user set is never changed.

`tests/ratchet/test_output_parsers.py` has the parsers of the most used open models, and compares the demanded tokens
with vLLM's own parsers. Does not import vLLM.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import SettingsError
from ratchet.settings.project_settings import VllmSettings
from ratchet.trainer.planning.model_shape import read_model_file

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
