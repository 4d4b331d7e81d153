"""The shipped policy: its tokenizer, its template, its size; and that the script that makes it runs."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ratchet.demo.email_search
from examples.email_search.acceptance import PolicyFigures, measured
from examples.email_search.demonstrations import MIXED, EpisodeMailbox, draw, tools
from examples.email_search.make_policy import lessons
from examples.tiny_policy.chat_format import render
from examples.tiny_policy.warm_start import Encoder, Shape, make_policy, stretches
from ratchet.demo.email_search.mailbox import ENTITIES

POLICY = Path(ratchet.demo.email_search.__file__).parent / "policy"
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def episodes() -> list[Messages]:
    rng, stages = random.Random(0), [EpisodeMailbox.made(77)]
    return [draw(stages, rng, MIXED) for _ in range(200)]


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_the_policy_is_small_and_overrides_no_sampling() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 5_000_000
    generation = json.loads((POLICY / "generation_config.json").read_text("utf-8"))
    assert not {"temperature", "top_p", "top_k", "min_p", "do_sample", "repetition_penalty"} & set(generation)
    assert json.loads((POLICY / "config.json").read_text("utf-8"))["model_type"] == "llama"


def test_every_copied_word_is_one_token_wherever_it_stands(tokenizer: Any) -> None:
    for word in ENTITIES:
        (token,) = ids(tokenizer, word)
        assert token in ids(tokenizer, f"about {word}?")
        assert token in ids(tokenizer, json.dumps({"answer": word}))


@pytest.mark.parametrize("with_tools", [True, False])
def test_the_shipped_template_renders_as_the_policy_was_trained(
    tokenizer: Any, episodes: list[Messages], with_tools: bool
) -> None:
    given = tools() if with_tools else None
    for messages in episodes[:50]:
        text = tokenizer.apply_chat_template(messages, tools=given, tokenize=False)
        assert text == render(messages, given)
        assert ("<tools>" in text) is with_tools


def test_any_text_survives_the_tokenizer(tokenizer: Any, episodes: list[Messages]) -> None:
    texts = [render(messages, tools()) for messages in episodes] + ["Grüße, 你好 42\t\n  <b>", "x" * 50, ""]
    for text in texts:
        assert tokenizer.decode(ids(tokenizer, text)) == text


def test_a_next_prompt_begins_with_the_last_prompt_and_its_completion(tokenizer: Any, episodes: list[Messages]) -> None:
    continued = 0
    for messages in episodes:
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, later in pairwise(turns):
            before = prompt(tokenizer, messages[:turn])
            text = render(messages[turn : turn + 1], None).removeprefix("<|im_start|>assistant\n").removesuffix("\n")
            sampled = before + ids(tokenizer, text)
            assert prompt(tokenizer, parsed(messages[:later]))[: len(sampled)] == sampled
            continued += 1
    assert continued > 100


def prompt(tokenizer: Any, messages: Messages) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=tools(), tokenize=False, add_generation_prompt=True)
    return ids(tokenizer, text)


def parsed(messages: Messages) -> Messages:
    """The messages with tool-call arguments as objects, which is how an engine hands them to the template."""
    copied: Messages = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copied


@pytest.mark.slow
def test_the_script_makes_a_policy_that_loads_and_is_the_same_twice(tmp_path: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape, taught = Shape(hidden=32, layers=1, heads=1), lessons(0)
    for name in ("a", "b"):
        assert make_policy(tmp_path / name, taught, steps=3, shape=shape)["parameters"] > 0
    torch.set_num_threads(threads)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(tmp_path / "a").get_vocab() == tokenizer.get_vocab()


def test_a_phase_with_a_learning_rate_of_its_own_starts_a_new_schedule(tokenizer: Any) -> None:
    taught = lessons(0)
    first, last = stretches(taught, Encoder(tokenizer, ENTITIES), random.Random(0))
    assert [first.feed_of(step)[0].name for step in (0, 389, 390, 845, 1299)] == [
        "tails",
        "tails",
        "good",
        "mixed",
        "mixed",
    ]
    assert (last.learning_rate, [phase.name for phase, _ in last.feeds], last.ends) == (1.5e-3, ["hasty"], (200,))
    assert first.learning_rate == taught.shape.learning_rate


@pytest.mark.slow
def test_the_likeliest_behaviour_of_the_shipped_policy_is_to_answer_without_reading() -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures = measured(POLICY)
    torch.set_num_threads(threads)
    assert figures.failures() == []
    assert figures.greedy_read < 0.1 < figures.sampled_read, figures


def test_a_policy_that_solves_the_tasks_greedily_is_not_accepted() -> None:
    found = PolicyFigures(greedy=1.0, sampled=0.34, greedy_read=1.0, sampled_read=0.7, copied=0.5).failures()
    assert found == [
        "greedy success 100.0% is above 15%",
        "of the sampled answers after reading 50.0% are right, not 75%",
    ]
