"""Claims about the parsers that are chosen for a model, from its chat template and tokenizer.

The table has what tells the templates of the most used open models apart, without their weights or whole templates.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from ratchet.errors import SettingsError
from ratchet.settings.project_settings import VllmSettings
from ratchet.supervisor import vllm_command
from ratchet.supervisor.vllm_command import ModelText, find_parsers, read_model_text, reasoning_parser
from ratchet.supervisor.vllm_command import tool_call_parser as parser_of
from tests.harness.json_server import IncomingRequest, JsonServer

CHATML = "{% for tool in tools %}{% endfor %}<|im_start|>{{ role }}"
LLAMA = "<|start_header_id|>{{ role }}<|end_header_id|>"
LLAMA_TOOLS = LLAMA + "{% if tools %}Environment: ipython{% endif %}"
THINK = ("<think>", "</think>")
HYBRID = "{% if enable_thinking is defined and enable_thinking is false %}<think>\\n\\n</think>\\n\\n{% endif %}"
CALL = '<tool_call>\\n{"name": tool.name}</tool_call>'
CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK = f"{{% if tool %}}<\uff5cAssistant\uff5c>{CALLS}"
R1 = DEEPSEEK + "```json{% set content = content.split('</think>')[-1] %}"
GLM = "[gMASK]<sop>{% for tool in tools %}<tool_call>{{ name }}<arg_key>k</arg_key>" + HYBRID
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
CODER = CHATML + "<tool_call>\\n<function=name>\\n<parameter=key>"
GRANITE = "<|start_of_role|>available_tools<|end_of_role|>"
GPT_OSS = "<|start|>assistant<|channel|>commentary to=functions.{{ tool }}<|call|>"
GEMMA4 = "{% if tools %}<|tool_call>call:f{}<tool_call|>{% endif %}<|channel>thought"
OLMO3 = CHATML + "<function_calls>"

# Model, marks of its chat template, tokens that matter, and the parsers of tool calls and of reasoning.
MODELS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "Qwen2.5-7B-Instruct": (CHATML + CALL, (), "hermes", "none"),
    "QwQ-32B": (CHATML + CALL + "<|im_start|>assistant\\n<think>\\n", THINK, "hermes", "qwen3"),
    "Qwen3-8B": (CHATML + CALL + HYBRID, THINK, "hermes", "qwen3"),
    "Qwen3-4B-Instruct-2507": (CHATML + CALL, THINK, "hermes", "none"),
    "Qwen3-4B-Thinking-2507": (CHATML + CALL + "'<|im_start|>assistant\\n<think>\\n'", THINK, "hermes", "qwen3"),
    "Qwen3-Coder-30B-A3B-Instruct": (CODER, THINK, "qwen3_coder", "none"),
    "Qwen3.5-9B": (CODER + HYBRID, THINK, "qwen3_coder", "qwen3"),
    "Qwen3.5-0.8B": (
        CODER + "{% if enable_thinking is true %}<think>{% endif %}</think>", THINK, "qwen3_coder", "deepseek_v3"
    ),
    "Meta-Llama-3-8B-Instruct": (LLAMA, (), "none", "none"),
    "Llama-3.1-8B-Instruct": (LLAMA_TOOLS + "<|python_tag|>", ("<|python_tag|>",), "llama3_json", "none"),
    "Llama-3.2-1B-Instruct": (LLAMA_TOOLS, ("<|python_tag|>",), "llama3_json", "none"),
    "Llama-3.3-70B-Instruct": (LLAMA_TOOLS, ("<|python_tag|>",), "llama3_json", "none"),
    "Llama-4-Scout-17B-16E-Instruct": (
        "<|header_start|>{% if tools %}Environment: ipython", ("<|python_start|>",), "llama4_pythonic", "none"
    ),
    "TinyLlama-1.1B-Chat-v1.0": ("<|user|>{{ content }}</s>", (), "none", "none"),
    "Yi-1.5-9B-Chat": ("<|im_start|>{{ role }}", (), "none", "none"),
    "SmolLM2-135M-Instruct": ("<|im_start|>{{ role }}", (), "none", "none"),
    "SmolLM3-3B": (
        CHATML + CALL + "{% set enable_thinking = true %}{% if enable_thinking %}<think>", THINK, "hermes", "qwen3"
    ),
    "Mistral-7B-Instruct-v0.3": ("{% if tools %}[TOOL_CALLS] [", ("[TOOL_CALLS]",), "mistral", "none"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("[TOOL_CALLS]tool[ARGS]", ("[TOOL_CALLS]",), "mistral", "none"),
    "Ministral-3-8B-Reasoning-2512": (
        "[TOOL_CALLS]tool[ARGS][THINK]", ("[TOOL_CALLS]", "[THINK]"), "mistral", "mistral"
    ),
    "Mixtral-8x7B-Instruct-v0.1": ("[INST] {{ content }} [/INST]", (), "none", "none"),
    "gemma-2-9b-it": ("<start_of_turn>{{ role }}", (), "none", "none"),
    "gemma-3-4b-it": ("<start_of_turn>{{ role }}", (), "none", "none"),
    "gemma-4-E4B-it": (GEMMA4, ("<|tool_call>", "<|channel>", "<channel|>"), "gemma4", "gemma4"),
    "Phi-3.5-mini-instruct": ("<|{{ role }}|>", (), "none", "none"),
    "phi-4": ("<|im_start|>{{ role }}<|im_sep|>", (), "none", "none"),
    "Phi-4-mini-instruct": ("<|tool|>{{ message['tools'] }}<|/tool|>", ("<|tool|>",), "none", "none"),
    "DeepSeek-V3-0324": (DEEPSEEK + "```json", (CALLS, CALLS_END), "deepseek_v3", "none"),
    "DeepSeek-R1-0528": (R1, (CALLS, CALLS_END, *THINK), "deepseek_v3", "deepseek_r1"),
    "DeepSeek-V3.1": (
        DEEPSEEK + "{% if not thinking is defined %}{% set thinking = false %}</think>",
        (CALLS, CALLS_END, *THINK), "deepseek_v31", "deepseek_v3",
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (R1 + "<think>\\n", THINK, "none", "deepseek_r1"),
    "DeepSeek-R1-Distill-Llama-8B": (R1 + "<think>\\n", THINK, "none", "deepseek_r1"),
    "GLM-4.5-Air": (GLM, ("<tool_call>", *THINK), "glm45", "glm45"),
    "GLM-4.6": (GLM, ("<tool_call>", *THINK), "glm45", "glm45"),
    "GLM-4.7-Flash": (GLM + "clear_thinking", ("<tool_call>", *THINK), "glm47", "glm47"),
    "GLM-5": (GLM + "clear_thinking", ("<tool_call>", *THINK), "glm47", "glm47"),
    "Kimi-K2-Instruct": ("{% if tools %}" + "".join(KIMI), KIMI, "kimi_k2", "none"),
    "Kimi-K2-Thinking": ("{% if tools %}" + "".join(KIMI) + "<think></think>", (*KIMI, *THINK), "kimi_k2", "kimi_k2"),
    "MiniMax-M2": ("<minimax:tool_call><think></think>", ("<minimax:tool_call>", *THINK), "minimax_m2", "minimax_m2"),
    "gpt-oss-20b": (GPT_OSS, ("<|channel|>", "<|call|>"), "openai", "openai_gptoss"),
    "Seed-OSS-36B-Instruct": (
        "<seed:tool_call><seed:think>", ("<seed:tool_call>", "<seed:think>", "</seed:think>"), "seed_oss", "seed_oss"
    ),
    "granite-3.3-8b-instruct": (
        GRANITE + "<|tool_call|>{% if thinking %}<think></think>", ("<|tool_call|>",), "granite", "none"
    ),
    "granite-4.0-h-tiny": (GRANITE + "<tool_call>", (), "granite4", "none"),
    "Hermes-3-Llama-3.1-8B": (CHATML + CALL, ("<|python_tag|>",), "hermes", "none"),
    "Hermes-4-14B": (CHATML + CALL + "{% set thinking = false %}<think></think>", THINK, "hermes", "deepseek_v3"),
    "OLMo-2-1124-7B-Instruct": ("<|user|>{{ content }}", (), "none", "none"),
    "Olmo-3-7B-Instruct": (OLMO3, (), "olmo3", "none"),
    "Olmo-3-7B-Think": (OLMO3 + "<think>", ("\u0120</", "</", "think", ">"), "olmo3", "olmo3"),
    "c4ai-command-r-08-2024": ("{% for tool in tools %}Action:\\n```json", (), "none", "none"),
    "command-a-03-2025": ("{% if tools %}<|START_ACTION|>", ("<|START_ACTION|>",), "none", "none"),  # needs a package
    "LFM2-1.2B": ("{% if tools %}<|tool_list_start|>", ("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2", "none"),
    "Nemotron-3-Nano-30B-A3B": (
        CODER + HYBRID + "truncate_history_thinking", THINK, "qwen3_coder", "nemotron_v3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_each_of_the_most_used_open_models_gets_the_parsers_of_its_own_template(name: str) -> None:
    template, tokens, tools, reasoning = MODELS[name]
    text = ModelText(template, frozenset(tokens))
    assert (parser_of(text)[0], reasoning_parser(text)) == (tools, reasoning)


def make_model(folder: Path, template: str, tokens: tuple[str, ...] = (), **config: object) -> str:
    added = [{"id": number, "content": token} for number, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"the": 9}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def test_a_llama_without_the_token_of_llama_3_starts_without_a_parser_and_one_line_says_so(tmp_path: Path) -> None:
    found = find_parsers(make_model(tmp_path, LLAMA_TOOLS), VllmSettings())
    assert (found.tool_calls, found.reasoning, found.arguments) == (None, None, ())
    (note,) = found.notes
    assert "llama3_json, but the tokenizer has no <|python_tag|>" in note
    assert "set vllm.tool_call_parser" in note


@pytest.mark.parametrize(
    ("template", "reason"),
    [("", "no chat template"), ("{{ messages }}", "has no tools"), ("{{ tools }}", "no parser of vLLM is known")],
)
def test_the_line_says_why_no_parser_fits(tmp_path: Path, template: str, reason: str) -> None:
    (note,) = find_parsers(make_model(tmp_path, template), VllmSettings()).notes
    assert reason in note


def test_a_thinking_model_gets_both_parsers_and_a_line_says_what_changes_for_clients(tmp_path: Path) -> None:
    found = find_parsers(make_model(tmp_path, CHATML + CALL + HYBRID, THINK), VllmSettings())
    assert found.arguments == (
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    )  # fmt: skip
    (note,) = found.notes
    assert "`reasoning`" in note
    assert "vllm.reasoning_parser: none" in note


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if enable_thinking %}<think>{% endif %}</think>", "deepseek_v3"),
        ("{%- if thinking -%}<think></think>{%- endif -%}", "deepseek_v3"),
        ("{% set enable_thinking = true %}{% if enable_thinking %}<think>{% endif %}", "qwen3"),
        ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "none"),
    ],
)
def test_where_thinking_is_off_by_default_no_plain_answer_is_taken_for_reasoning(template: str, parser: str) -> None:
    """vLLM's parsers of models that always think take an answer without </think> for reasoning."""
    assert reasoning_parser(ModelText(template, frozenset(THINK))) == parser


def test_what_the_user_set_wins_over_the_template(tmp_path: Path) -> None:
    model = make_model(tmp_path, CHATML + CALL + HYBRID, THINK)
    own = VllmSettings(tool_call_parser="pythonic", reasoning_parser="none")
    assert find_parsers(model, own).arguments == ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    appended = VllmSettings(extra_args=("--reasoning-parser=deepseek_r1", "--tool-call-parser", "xlam"))
    assert find_parsers(model, appended) == vllm_command.OutputParsers(None, None)
    other = tmp_path / "mine.jinja"
    other.write_text(CODER)
    given = VllmSettings(extra_args=("--chat-template", str(other)))
    assert find_parsers(model, given).tool_calls == "qwen3_coder"


def test_a_parser_that_vllm_does_not_have_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    model = make_model(tmp_path, CHATML + CALL)
    with pytest.raises(SettingsError, match=r"vllm\.reasoning_parser: 'qwen33' is not a parser .* nearest is qwen3\. "):
        find_parsers(model, VllmSettings(reasoning_parser="qwen33"))
    assert find_parsers(model, VllmSettings(reasoning_parser="qwen33"), elsewhere=True).reasoning == "qwen33"


def test_templates_are_found_wherever_a_model_keeps_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": CHATML + CALL}]
    text = read_model_text(make_model(tmp_path, "", ("<a>",), chat_template=named))
    assert parser_of(text) == ("hermes", "")
    assert text.tokens >= {"<a>", "the"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text(json.dumps({"special_tokens": [{"token_str": "[TOOL_CALLS]"}]}))
    assert parser_of(read_model_text(str(tmp_path))) == ("mistral", "")


def test_of_a_hub_name_the_small_files_are_read_and_the_name_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    tokens = {"added_tokens_decoder": {"1": {"content": "<|python_tag|>"}}, "chat_template": CHATML + CALL}

    def respond(request: IncomingRequest) -> tuple[int, Any]:
        requested.append(request.path.rpartition("/")[2])
        return (200, tokens) if requested[-1] == "tokenizer_config.json" else (404, "")

    hub = JsonServer(respond)
    try:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        found = find_parsers("acme/Hermes-3-Llama-3.1-8B", VllmSettings())
    finally:
        hub.close()
    assert (found.tool_calls, found.notes) == ("hermes", ())
    assert requested == ["tokenizer_config.json", "chat_template.jinja"]


# Makes each parser with a tokenizer that has the given tokens only, and prints why that fails, by its name.
PROGRAM = """
import json, sys
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

class Tokenizer:
    def __init__(self, tokens):
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.all_special_tokens, self.all_special_ids, self.chat_template = list(self.ids), list(self.ids.values()), ""
        self.init_kwargs = {}
    def get_vocab(self): return self.ids
    def encode(self, text, **_): return [self.ids[text]] if text in self.ids else []
    def decode(self, ids, **_): return ""

failed = {}
for kind, name, tokens in json.load(sys.stdin):
    manager = ToolParserManager if kind == "tools" else ReasoningParserManager
    find = manager.get_tool_parser if kind == "tools" else manager.get_reasoning_parser
    try:
        find(name)(Tokenizer(tokens))
    except Exception as error:
        failed[f"{kind} {name}"] = str(error)
print(json.dumps(failed))
"""


@pytest.mark.slow
def test_vllm_takes_each_parser_with_a_tokenizer_of_the_tokens_that_its_rule_demands() -> None:
    rules = {"tools": vllm_command._TOOL_RULES, "reasoning": vllm_command._REASONING_RULES}
    cases = [(kind, rule.parser, rule.tokens) for kind, some in rules.items() for rule in some if not rule.package]
    cases += [("reasoning", "qwen3", THINK), ("reasoning", "deepseek_v3", THINK)]

    def failures(tokens: bool) -> dict[str, str]:
        given = json.dumps([(kind, name, needed if tokens else ()) for kind, name, needed in cases])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert failures(tokens=True) == {}
    assert {"tools llama3_json", "tools mistral", "tools deepseek_v3", "reasoning deepseek_r1"} <= set(failures(False))
