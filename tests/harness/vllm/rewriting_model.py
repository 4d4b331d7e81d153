"""A tiny model with random weights whose chat template rewrites history, and an adapter; created in seconds.

Its text is noise, but it ends its thoughts and turns where the request favors the ids that end them (`bias`), and calls
tools where they are required. A test of exact ids needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("rewriting.jinja")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_inbox",
        "description": "Search",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string", "pattern": "^[a-z ]{3,8}$"},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["q", "n"],
            "additionalProperties": False,
        },
    },
}

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_CORPUS = (
    "Find the mail about the picnic in Paris, please. What did Alice write? Nothing was found.",
    "You are an agent that searches an inbox. Tools: system user assistant tool",
    '{"name": "search_inbox", "arguments": {"q": "abc", "n": 12}}',
    '{"type": "function", "function": {"parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}',
)


@dataclass(frozen=True)
class Model:
    """The folders of the model and its adapter. `bias` is the `logit_bias` that makes it end."""

    folder: Path
    adapter: Path
    bias: dict[str, float]


def make(folder: Path) -> Model:
    """Write the model and the adapter into `folder`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    ids = tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    return Model(folder / "model", folder / "adapter", {str(ids[0]): 4.5, str(ids[1]): 3.0})


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_only = Tokenizer(models.BPE())
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bytes_only.train_from_iterator(_CORPUS * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer
