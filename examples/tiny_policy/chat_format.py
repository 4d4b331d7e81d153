"""The chat template and the tokenizer of a tiny policy.

ChatML with Hermes-style tool calls: what vLLM's `hermes` parser reads back is what the template writes, so that the
prompt of a next call begins with the token ids of the call before. The tokenizer splits text into runs of letters and
runs of everything else; each run that the demonstrations use is one token, anything else falls apart into bytes. There
are no merges, hence exactly one way to write a known run.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
Drawn = tuple[Messages, Tools | None]  # an episode, and the tools that its prompt names

END = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
RUN = r"[A-Za-z_]+|[^A-Za-z_]+"
TEMPLATE = """\
{%- macro system(text) -%}
<|im_start|>system
{{ text }}
{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool.function.name }}({{ (tool.function.parameters.properties or {}) | join(", ") }})
{%- endfor %}
</tools>
{%- endif %}<|im_end|>
{% endmacro -%}
{%- if messages[0].role != "system" and tools %}{{ system("") }}{% endif %}
{%- for message in messages %}
{%- if message.role == "system" %}{{ system(message.content) }}
{%- elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == "assistant" %}<|im_start|>assistant
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
{%- set given = call.function.arguments %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ given if given is string else given | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def render(messages: Messages, tools: Tools | None, *, generation: bool = False) -> str:
    """The text of a chat, as transformers and vLLM render it."""
    import jinja2

    global _compiled
    if _compiled is None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        _compiled = environment.from_string(TEMPLATE)
    return str(_compiled.render(messages=messages, tools=tools, add_generation_prompt=generation))


_compiled: Any = None


def make_tokenizer(texts: Iterable[str], words: Set[str], pattern: str = RUN, min_count: int = 3) -> Any:
    """A fast tokenizer whose vocabulary is 256 bytes, `words`, the runs of `texts` seen `min_count` times, the markers.

    `pattern` is what a run is.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    border = re.compile("|".join(map(re.escape, SPECIAL + MARKERS)))
    counts = Counter(run for text in texts for part in border.split(text) for run in re.findall(pattern, part))
    runs = words | {run for run, count in counts.items() if count >= min_count and len(run) > 1}
    spelled = sorted(byte_level.pre_tokenize_str(run)[0][0] for run in runs)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(alphabet + spelled))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        chat_template=TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
