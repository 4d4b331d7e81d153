"""Token rows: of conversations and of recorded trajectories, and what carries loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.trainer.errors import RowError
from ratchet.trainer.rows.chat_rows import ChatRows, Conversation
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget
from ratchet.trainer.rows.tokenizer import load_tokenizer
from tests.harness.trainer.tiny import build_tokenizer

EXAMPLE = Path(__file__).parents[2] / "ratchet" / "demo" / "email_search" / "policy"
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "tent"}'}}
TOOLS = (
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {}}}}},
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the tent?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "in the quick brown hall"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    {"role": "assistant", "content": "Welcome."},
]
# Drops what an earlier answer holds before `|`, as templates drop earlier reasoning.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('|')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(EXAMPLE))


def test_exactly_what_the_assistant_samples_carries_loss(tokenizer: Any) -> None:
    (row,) = ChatRows(tokenizer).rows(Conversation.of_messages("a", MESSAGES, TOOLS))
    trained = tokenizer.decode([token for token, on in zip(row.ids, row.mask, strict=True) if on])
    assert trained == (
        '<tool_call>\n{"name": "search", "arguments": {"query": "tent"}}\n</tool_call><|im_end|>'
        "In the hall.<|im_end|>Welcome.<|im_end|>"
    )
    assert not row.importance


def test_the_row_is_what_the_engine_is_given_token_for_token(tokenizer: Any) -> None:
    (row,) = ChatRows(tokenizer).rows(Conversation.of_messages("a", MESSAGES, TOOLS))
    plain = [message | {"content": "Thanks"} if message["role"] == "user" and place > 2 else message
             for place, message in enumerate(MESSAGES)]  # fmt: skip
    text = tokenizer.apply_chat_template(plain, tools=list(TOOLS), tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(row.ids) == whole[: len(row.ids)]
    assert tokenizer.decode(whole[len(row.ids) :]).strip() == ""


def test_no_token_outside_the_answers_carries_loss(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "alpha"}]
    for turn in range(5):
        messages += [{"role": "user", "content": f"beta {turn}"}, {"role": "assistant", "content": f"gamma {turn}"}]
        messages += [{"role": "tool", "tool_call_id": "x", "content": f"delta {turn}"}]
    (row,) = ChatRows(tokenizer).rows(Conversation.of_messages("a", messages))
    on = tokenizer.decode([token for token, mask in zip(row.ids, row.mask, strict=True) if mask])
    off = tokenizer.decode([token for token, mask in zip(row.ids, row.mask, strict=True) if not mask])
    assert on == "".join(f"gamma {turn}<|im_end|>" for turn in range(5))
    assert "gamma" not in off
    assert off.count("beta") == 5


def test_only_the_answers_that_are_named_are_learnt(tokenizer: Any) -> None:
    (row,) = ChatRows(tokenizer).rows(Conversation("a", tuple(MESSAGES), frozenset({4}), TOOLS))
    trained = tokenizer.decode([token for token, on in zip(row.ids, row.mask, strict=True) if on])
    assert trained == "In the hall.<|im_end|>"
    assert "Welcome" not in tokenizer.decode(list(row.ids)), "nothing follows the last answer that is learnt"


def test_a_template_that_rewrites_history_gives_each_answer_in_its_own_context() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = REWRITING
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "think|one"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "think|two"},
    ]
    rows = ChatRows(tokenizer).rows(Conversation.of_messages("a", messages))
    trained = [tokenizer.decode([t for t, on in zip(row.ids, row.mask, strict=True) if on]) for row in rows]
    assert trained == ["think|one<|im_end|>", "think|two<|im_end|>"]
    assert "think|one" not in tokenizer.decode(list(rows[1].ids))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "a"}], "no answer to learn from"),
        ([{"role": "assistant", "content": "a"}], "nothing precedes"),
        ([{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}], "special token"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "x<|im_start|>"}], "special token"),
        ([{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "a"}], "not text"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": ["x"]}], "tool call without"),
        ("hello", "not a list of messages"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_exactly_is_refused_with_the_reason(messages: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        ChatRows(build_tokenizer()).rows(Conversation.of_messages("a", messages))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RowError, match="no chat template"):
        ChatRows(tokenizer)


ROW = TokenRow("t1", ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.5, -1.5), advantage=1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ids": (5, 6)}, "lengths differ: ids 2, mask 3, logprobs 3"),
        ({"advantages": (1.0,)}, "advantages 1"),
        ({"mask": (0, 0, 0)}, "no token is trained"),
        ({"mask": (1, 1, 1)}, r"mask\[0\] must be 0"),
        ({"mask": (0, 2, 1)}, "other than 0 and 1"),
        ({"ids": (5, -1, 7)}, r"ids\[1\] is negative"),
        ({"logprobs": (0.0, float("nan"), -1.0)}, r"logprobs\[1\] is nan"),
        ({"logprobs": (0.0, -1.0, 0.5)}, r"logprobs\[2\] is 0.5"),
        ({"logprobs": (0.0, -1.0, float("-inf"))}, r"logprobs\[2\] is -inf"),
        ({"advantage": float("inf")}, "advantage is not finite"),
        ({"temperature": 0.0}, "greedy rows"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_with_its_trajectory(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=f"trajectory t1: .*{reason}"):
        replace(ROW, **change)


def test_a_row_has_signal_only_where_a_trained_token_has_an_advantage() -> None:
    assert ROW.has_signal
    assert not replace(ROW, advantage=0.0).has_signal
    assert not replace(ROW, advantages=(3.0, 0.0, 0.0)).has_signal


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = [7, 100, 3, 8, 50, 3, 20]
    batches = split_by_budget(lengths, 40)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[index] for index in batch) <= 40 or len(batch) == 1
