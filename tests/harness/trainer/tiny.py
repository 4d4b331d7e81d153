"""A tiny random Qwen3 with a ChatML tokenizer, made in a folder in well under a second.

The same every time. Qwen3, because transformers rebuilds the tokenizer of a Qwen2 and ignores the one saved here; a
head size of 32, because vLLM's CPU attention takes no smaller one. Serves as a base model for tests of the trainer and,
through vLLM, of the whole circle. Its text is noise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.trainer.rows.token_row import TokenRow

VOCABULARY = 512
ASSISTANT = "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}" + ASSISTANT + "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ("the quick brown fox calls the tool add with 1 2 3", "user assistant system tool", "0123456789 + - = answer")


def build_tokenizer() -> Any:
    """A byte-level BPE tokenizer that can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bpe = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, bpe)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        padding_side="left",
    )


def build_tiny_model(folder: Path, *, hidden: int = 64, layers: int = 2, positions: int = 1024) -> Path:
    """Write model and tokenizer into `folder` and return it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_row(seed: int, *, advantage: float | None = None, **fields: Any) -> TokenRow:
    """A row of one to three sampled turns, with tool results between them and logprobs near those of noise."""
    dice = random.Random(seed)
    ids, mask = _segment(dice, 5, 20, 0)
    for turn in range(dice.randint(1, 3)):
        context, sampled = _segment(dice, 2, 15, 0) if turn else ([], []), _segment(dice, 3, 25, 1)
        ids, mask = ids + context[0] + sampled[0], mask + context[1] + sampled[1]
    logprobs = [-6.2 + dice.gauss(0, 0.3) if trained else 0.0 for trained in mask]
    return TokenRow(
        trajectory_id=f"t{seed}",
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantage=dice.gauss(0, 1) if advantage is None else advantage,
        **fields,
    )


def build_rows(count: int, *, seed: int = 0) -> Sequence[TokenRow]:
    """Ragged rows; the same for the same seed."""
    return [build_row(1000 * seed + index) for index in range(count)]


def _segment(dice: random.Random, min_length: int, max_length: int, trained: int) -> tuple[list[int], list[int]]:
    length = dice.randint(min_length, max_length)
    return [dice.randrange(3, VOCABULARY) for _ in range(length)], [trained] * length
