"""Which tokens are trained: those that the engine sampled in this trajectory's answered calls, each once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ratchet.store.records import Call, Choice, pack_ids, pack_logprobs
from ratchet.store.states import CallState
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.token_row import TokenRow


def choice(ids: tuple[int, ...], index: int = 0, logprobs: tuple[float, ...] | None = None) -> Choice:
    sampled = logprobs if logprobs is not None else tuple(-0.5 for _ in ids)
    return Choice(index=index, finish_reason="stop", token_ids=pack_ids(ids), logprobs=pack_logprobs(sampled))


def call(name: str, prompt: tuple[int, ...], *answers: Choice, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "id": name, "trajectory_id": "t", "state": CallState.ANSWERED, "alias": "a", "version": 1, "dialect": "chat",
        "streamed": False, "linked_by": "root", "parent_call": None, "parent_choice": 0, "role": None,
        "sampling": {"temperature": 1.0}, "prompt_node": "", "tools_hash": "", "context": "root",
        "prompt_ids": pack_ids(prompt), "prompt_tokens": len(prompt), "completion_tokens": 0, "started_at": 0.0,
        "first_byte_at": None, "ended_at": 1.0, "status": 200, "untrainable": None, "error": None, "choices": answers,
    }  # fmt: skip
    return Call(**(values | changes))


def test_token_exact_calls_are_one_row() -> None:
    calls = [
        call("1", (1, 2), choice((3, 4))),
        call("2", (5,), choice((6,)), parent_call="1", context="exact"),
        call("3", (7, 8), choice((9,)), parent_call="2", context="exact"),
    ]
    (row,) = build_rows("t", calls, 0.5).rows
    assert row.ids == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert row.mask == (0, 0, 1, 1, 0, 1, 0, 0, 1)
    assert row.logprobs == (0, 0, -0.5, -0.5, 0, -0.5, 0, 0, -0.5)
    assert row.advantage == 0.5


def test_ten_exact_turns_cost_the_length_of_the_trajectory_and_not_the_sum_of_its_calls() -> None:
    calls = [
        call("0", (1,) * 400, choice((2,) * 60)),
        *(
            call(str(turn), (3,) * 90, choice((2,) * 60), parent_call=str(turn - 1), context="exact")
            for turn in range(1, 10)
        ),
    ]
    (row,) = build_rows("t", calls, 1.0).rows
    assert len(row.ids) == 400 + 10 * 60 + 9 * 90
    one_sequence_per_call = sum(400 + turn * (60 + 90) + 60 for turn in range(10))
    assert one_sequence_per_call > 4 * len(row.ids)


def test_a_fork_begins_a_row_of_its_own() -> None:
    calls = [
        call("1", (1, 2), choice((3,))),
        call("2", (1, 9, 9), choice((6,)), parent_call="1", context="fork"),
    ]
    rows = build_rows("t", calls, 1.0).rows
    assert [(row.ids, row.mask) for row in rows] == [((1, 2, 3), (0, 0, 1)), ((1, 9, 9, 6), (0, 0, 0, 1))]


def test_a_shared_context_is_trained_once() -> None:
    calls = [
        call("1", (1,), choice((2,))),
        call("2", (3,), choice((4,)), parent_call="1", context="exact"),
        call("3", (5,), choice((6,)), parent_call="1", context="exact"),
    ]
    rows = build_rows("t", calls, 1.0).rows
    assert sum(sum(row.mask) for row in rows) == 3
    trained = [token for row in rows for token, mark in zip(row.ids, row.mask, strict=True) if mark]
    assert sorted(trained) == [2, 4, 6]


def test_a_continued_trajectory_trains_only_its_own_tokens() -> None:
    earlier = call("1", (1,), choice((2,)), trajectory_id="before")
    own = call("2", (3,), choice((4,)), parent_call="1", context="exact")
    (row,) = build_rows("t", [earlier, own], 1.0).rows
    assert (row.ids, row.mask) == ((1, 2, 3, 4), (0, 0, 0, 1))


def test_what_may_not_be_trained_is_counted_with_its_reason() -> None:
    calls = [
        call("1", (1,), choice((2, 3)), state=CallState.ABORTED),
        call("2", (1,), choice((2,)), sampling={"temperature": 0}),
        call("3", (1,), choice((2, 3, 4), logprobs=(-1.0,))),
        call("4", (1,), choice((2,)), untrainable="image"),
        call("5", (1,), choice((2,)), context="exact", parent_call="lost"),
    ]
    built = build_rows("t", calls, 1.0)
    assert built.rows == ()
    assert built.untrained == {
        "aborted": 2,
        "greedy": 1,
        "length_mismatch": 3,
        "image": 1,
        "context_unknown": 1,
    }


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": "0"}, "greedy"),
        ({"temperature": 1e-7}, "greedy"),
        ({"temperature": "warm"}, "invalid_temperature"),
        ({"temperature": -1}, "invalid_temperature"),
        ({"response_format": {"type": "json_object"}}, "constrained_sampling"),
        ({"tool_choice": "required"}, "constrained_sampling"),
        ({"tool_grammar": True}, "constrained_tool_calls"),
        ({"allowed_token_ids": [1, 2]}, "constrained_sampling"),
        ({"thinking_token_budget": 1}, "constrained_sampling"),
        ({"thinking_token_budget": 0}, "constrained_sampling"),
        ({"thinking_token_budget": True}, "constrained_sampling"),
    ],
)
def test_odd_sampling_is_left_out_and_never_stops_the_trainer(sampling: dict[str, Any], reason: str) -> None:
    built = build_rows("t", [call("1", (1,), choice((2,)), sampling=sampling)], 1.0)
    assert (built.rows, built.untrained) == ((), {reason: 1})


@pytest.mark.parametrize("budget", [None, -1, 2])
def test_an_answer_that_cannot_have_used_up_its_budget_of_thinking_is_trained(budget: int | None) -> None:
    (row,) = build_rows("t", [call("1", (1,), choice((2,)), sampling={"thinking_token_budget": budget})], 1.0).rows
    assert row.mask == (0, 1)


def test_plain_text_and_free_tool_choice_are_trained() -> None:
    free = {"response_format": {"type": "text"}, "tool_choice": "auto", "temperature": "0.5"}
    (row,) = build_rows("t", [call("1", (1,), choice((2,)), sampling=free)], 1.0).rows
    assert row.temperature == 0.5


def test_of_several_answers_the_one_that_the_agent_took_is_trained() -> None:
    calls = [
        call("1", (1,), choice((2,)), choice((3,), index=1)),
        call("2", (4,), choice((5,)), parent_call="1", parent_choice=1, context="exact"),
    ]
    built = build_rows("t", calls, 1.0)
    assert [row.ids for row in built.rows] == [(1, 3, 4, 5)]
    assert built.untrained == {"answer_discarded": 1}


def test_of_several_answers_that_the_agent_took_each_is_a_row() -> None:
    calls = [
        call("1", (1,), choice((2,)), choice((3,), index=1), choice((4,), index=2)),
        call("2", (5,), choice((6,)), parent_call="1", parent_choice=2, context="exact"),
        call("3", (7,), choice((8,)), parent_call="1", parent_choice=0, context="exact"),
    ]
    built = build_rows("t", calls, 1.0)
    assert {(row.ids, row.mask) for row in built.rows} == {((1, 4, 5, 6), (0, 1, 0, 1)), ((1, 2, 7, 8), (0, 1, 0, 1))}
    assert built.untrained == {"answer_discarded": 1}


def test_of_several_last_answers_the_one_that_was_judged_is_trained() -> None:
    built = build_rows("t", [call("1", (1,), choice((2,)), choice((3,), index=1))], 1.0)
    assert [row.ids for row in built.rows] == [(1, 2)]
    assert built.untrained == {"answer_discarded": 1}


def test_segments_are_rows_of_their_own_that_share_the_reward() -> None:
    calls = [
        call("main", (1,), choice((2,))),
        call("sub", (30,), choice((31,)), linked_by="quote"),
        call("sub 2", (32,), choice((33,)), parent_call="sub", context="exact"),
        call("main 2", (3,), choice((4,)), parent_call="main", context="exact"),
        call("compacted", (50,), choice((51,)), linked_by="quote"),
    ]
    rows = build_rows("t", calls, 0.7).rows
    assert {row.ids for row in rows} == {(1, 2, 3, 4), (30, 31, 32, 33), (50, 51)}
    assert {row.advantage for row in rows} == {0.7}
    assert sum(sum(row.mask) for row in rows) == 5


@pytest.mark.parametrize("by", ["retry", "resend"])
def test_an_answer_that_the_client_never_had_is_not_trained(by: str) -> None:
    calls = [
        call("1", (1,), choice((2,)), prompt_node="p"),
        call("2", (1,), choice((3,)), prompt_node="p", linked_by=by),
        call("3", (4,), choice((5,)), parent_call="2", context="exact", prompt_node="q"),
    ]
    built = build_rows("t", calls, 1.0)
    assert [row.ids for row in built.rows] == [(1, 3, 4, 5)]
    assert built.untrained == {"answer_lost": 1}


def test_a_row_has_one_temperature() -> None:
    calls = [
        call("1", (1,), choice((2,)), sampling={"temperature": 0.5}),
        call("2", (3,), choice((4,)), parent_call="1", context="exact", sampling={}),
    ]
    rows = build_rows("t", calls, 1.0).rows
    assert {(row.temperature, row.ids, row.mask) for row in rows} == {
        (1.0, (1, 2, 3, 4), (0, 0, 0, 1)),
        (0.5, (1, 2), (0, 1)),
    }


def test_truncated_sampling_is_known_to_the_row_and_corrected() -> None:
    def row(**sampling: Any) -> TokenRow:
        (built,) = build_rows("t", [call("1", (1,), choice((2,)), sampling=sampling)], 1.0).rows
        return built

    for neutral in ({}, {"top_p": 1, "top_k": -1}, {"top_p": None, "top_k": 0, "min_p": 0.0}):
        assert (row(**neutral).truncation, row(**neutral).importance) == (None, True)
    assert (row(top_p=0.9).truncation, row(top_p=0.9).importance) == ((0, 0.9, 0.0), True)
    assert row(top_k=20, min_p=0.05).truncation == (20, 1.0, 0.05)


@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1}, {"logit_bias": {"3": 2}},
     {"min_tokens": 2}],
    ids=str,
)  # fmt: skip
def test_penalties_and_biases_are_counted_and_trained_only_if_wanted(sampling: dict[str, Any]) -> None:
    calls = [call("1", (1,), choice((2, 3)), sampling=sampling)]
    built = build_rows("t", calls, 1.0)
    assert (built.rows, built.untrained) == ((), {"penalized_sampling": 2})
    (row,) = build_rows("t", calls, 1.0, penalized=True).rows
    assert not row.importance
    assert build_rows("t", calls, 1.0, imitated=True).rows


def test_a_truncated_answer_carries_no_loss_with_mask_truncated() -> None:
    cut = msgspec.structs.replace(choice((6, 7)), finish_reason="length")
    calls = [
        call("1", (1, 2), choice((3, 4))),
        call("2", (5,), cut, parent_call="1", context="exact"),
        call("3", (8,), choice((9,)), parent_call="2", context="exact"),
    ]
    masked = build_rows("t", calls, 0.5, mask_truncated=True)
    assert [row.mask for row in masked.rows] == [(0, 0, 1, 1, 0, 0, 0, 0, 1)]  # still context of what came after
    assert masked.untrained == {"truncated": 2}
    assert [row.mask for row in build_rows("t", calls, 0.5).rows] == [(0, 0, 1, 1, 0, 1, 1, 0, 1)]
