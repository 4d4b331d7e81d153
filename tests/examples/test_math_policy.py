"""The shipped policy of math and planner: its tokenizer, its template, its size; and the script that makes it."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import examples.math
from examples.math.demonstrations import MIXED, NUMBERS, drawn
from examples.math.make_policy import lessons
from examples.planner.demonstrations import planned, worked
from examples.tiny_policy.chat_format import Drawn, Messages, Tools, render
from examples.tiny_policy.warm_start import Shape, make_policy
from tests.examples.test_policy import ids, parsed

POLICY = Path(examples.math.__file__).parent / "policy"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def episodes() -> list[Drawn]:
    rng = random.Random(0)
    return [*(drawn(rng, MIXED) for _ in range(60)), *(planned(rng, good=False) for _ in range(60)), worked(rng, True)]


def test_the_policy_is_small_and_overrides_no_sampling() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 2_000_000
    generation = json.loads((POLICY / "generation_config.json").read_text("utf-8"))
    assert not {"temperature", "top_p", "top_k", "min_p", "do_sample", "repetition_penalty"} & set(generation)


def test_every_number_that_is_copied_is_one_token_wherever_it_stands(tokenizer: Any) -> None:
    for number in sorted(NUMBERS)[::7]:
        (token,) = ids(tokenizer, number)
        assert token in ids(tokenizer, f"What is {number} plus 1?")
        assert token in ids(tokenizer, json.dumps({"expression": f"1 + {number}"}))


def test_the_shipped_template_renders_as_the_policy_was_trained(tokenizer: Any, episodes: list[Drawn]) -> None:
    for messages, tools in episodes:
        assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == render(messages, tools)


def test_a_next_prompt_begins_with_the_last_prompt_and_its_completion(tokenizer: Any, episodes: list[Drawn]) -> None:
    continued = 0
    for messages, tools in episodes:
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, later in pairwise(turns):
            text = render(messages[turn : turn + 1], None).removeprefix("<|im_start|>assistant\n").removesuffix("\n")
            sampled = prompt(tokenizer, messages[:turn], tools) + ids(tokenizer, text)
            assert prompt(tokenizer, parsed(messages[:later]), tools)[: len(sampled)] == sampled
            continued += 1
    assert continued > 60


def prompt(tokenizer: Any, messages: Messages, tools: Tools | None) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return ids(tokenizer, text)


@pytest.mark.slow
def test_the_script_makes_a_policy_with_the_shipped_vocabulary(tmp_path: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert make_policy(tmp_path, lessons(0), steps=2, shape=Shape(hidden=32, layers=1, heads=1))["parameters"] > 0
    torch.set_num_threads(threads)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()
