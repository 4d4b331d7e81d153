"""Splicing sampled ids into a re-rendered prompt: exact where only answers differ, otherwise a fork."""

from __future__ import annotations

import random

import pytest

from ratchet.proxy.exact.chat_templates import Template
from ratchet.proxy.exact.splice import (
    EMPTY_CONTEXT,
    Context,
    ContextFork,
    first_after_change,
    splice,
    tail_after_change,
)
from ratchet.store.records import pack_ids, unpack_ids

END = 99  # ends a turn
USER, ANSWER = 1, 2  # begin one


def context_of(*turns: tuple[list[int], list[int]], ended: bool = True) -> Context:
    """Return the context of turns: (ids sent, ids sampled after them)."""
    context = EMPTY_CONTEXT
    for sent, sampled in turns:
        context = context.followed(pack_ids(sent), pack_ids([*sampled, END]))
    if ended:
        return context
    *before, (start, end) = context.spans
    return Context(context.ids[:-4], (*before, (start, end - 1)))


FIRST = context_of(([USER, 10, 11, END, ANSWER], [20, 21]))


def test_the_new_prompt_is_the_old_ids_and_the_new_part_of_the_render() -> None:
    rendered = [USER, 10, 11, END, ANSWER, 77, 78, 79, END, USER, 30, END, ANSWER]
    spliced = splice(FIRST, rendered, END)
    assert spliced is not None
    assert spliced.ids == [USER, 10, 11, END, ANSWER, 20, 21, END, USER, 30, END, ANSWER]
    assert spliced.tail == [USER, 30, END, ANSWER]


def test_a_render_that_starts_with_the_old_ids_needs_no_splice() -> None:
    assert splice(FIRST, [*unpack_ids(FIRST.ids), USER, 30, END, ANSWER], END) is None


def test_a_truncated_answer_is_closed_before_the_next_turn() -> None:
    cut = context_of(([USER, 10, END, ANSWER], [20]), ended=False)
    spliced = splice(cut, [USER, 10, END, ANSWER, 77, END, USER, 30, END, ANSWER], END)
    assert spliced is not None
    assert spliced.ids == [USER, 10, END, ANSWER, 20, END, USER, 30, END, ANSWER]


def test_a_generation_prompt_may_be_rendered_differently_later() -> None:
    thinking = context_of(([USER, 10, END, ANSWER, 50, 51], [20]))
    spliced = splice(thinking, [USER, 10, END, ANSWER, 77, END, USER, 30, END, ANSWER, 50, 51], END)
    assert spliced is not None
    assert spliced.ids[:8] == [USER, 10, END, ANSWER, 50, 51, 20, END]


@pytest.mark.parametrize(
    ("rendered", "reason"),
    [
        ([USER, 10, 12, END, ANSWER, 77, END, USER, 30, END, ANSWER], "history_edited"),
        ([USER, 10, 11, 11, END, ANSWER, 77, END, USER, 30, END, ANSWER], "history_edited"),
        ([USER, 10, 11, END, ANSWER], "turns_gone"),
        ([USER, 10, 11, END, ANSWER, 77, END], "nothing_new"),
    ],
)
def test_any_difference_in_what_was_sent_is_a_fork(rendered: list[int], reason: str) -> None:
    with pytest.raises(ContextFork) as fork:
        splice(FIRST, rendered, END)
    assert fork.value.reason == reason


def test_an_answer_with_a_turn_end_inside_is_a_fork() -> None:
    odd = Context(pack_ids([USER, 10, END, ANSWER, 20, END, 21, END]), ((4, 8),))
    with pytest.raises(ContextFork, match="turn_end_inside_answer"):
        splice(odd, [USER, 10, END, ANSWER, 20, END, 78, END, USER, 30, END, ANSWER], END)


def test_long_text_before_an_answer_in_the_same_turn_must_be_unchanged() -> None:
    """Some templates end only answers with an id. The user's text is then in the answer's turn."""
    words = list(range(100, 140))
    context = context_of((words, [20]))
    assert splice(context, [*words, 77, END, 30], END) is not None
    with pytest.raises(ContextFork, match="history_edited"):
        splice(context, [*words[:10], 5, *words[11:], 77, END, 30], END)


def test_every_splice_starts_with_the_old_ids_and_ends_with_the_renders() -> None:
    dice = random.Random(5)
    for _ in range(300):
        history, context, rendered = [], EMPTY_CONTEXT, []
        for _ in range(dice.randint(1, 6)):
            sent = [USER, *dice.choices(range(3, 90), k=dice.randint(0, 9)), END, ANSWER]
            sampled = dice.choices(range(3, 90), k=dice.randint(0, 9))
            history.append((sent, sampled))
            context = context.followed(pack_ids(sent), pack_ids([*sampled, END]))
            rendered += [*sent, *(sampled if dice.random() < 0.5 else dice.choices(range(3, 90), k=4)), END]
        new = [USER, 7, END, ANSWER]
        spliced = splice(context, [*rendered, *new], END)
        before = list(unpack_ids(context.ids))
        if spliced is None:
            assert [*rendered, *new][: len(before)] == before
        else:
            assert spliced.ids == before + new
        assert [unpack_ids(context.ids)[a:b] for a, b in context.spans] == [(*sampled, END) for _, sampled in history]


def test_the_end_of_an_answer_is_found_by_changing_its_text() -> None:
    one, other = [USER, 10, END, ANSWER, 20, 21, END, USER, 30, END], [USER, 10, END, ANSWER, 55, END, USER, 30, END]
    assert tail_after_change(one, other, END) == [USER, 30, END]
    assert first_after_change(one, other) == END


def test_a_template_that_drops_the_changed_words_proves_nothing() -> None:
    same = [USER, 10, END, ANSWER]
    assert tail_after_change(same, same, END) is None
    assert first_after_change(same, same) is None


def test_an_exact_prompt_that_leaves_far_fewer_tokens_for_the_answer_is_a_fork() -> None:
    template = Template(END, "<|end|>", max_model_len=1000)
    template.check_context_length(plain=500, exact=700, max_tokens=300)
    template.check_context_length(plain=500, exact=740, max_tokens=None)
    for wanted, exact in ((400, 700), (None, 760)):
        with pytest.raises(ContextFork, match="too_long"):
            template.check_context_length(500, exact, wanted)
    template.check_context_length(plain=700, exact=500, max_tokens=900)
