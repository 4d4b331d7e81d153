"""Sequences put together from what each call stores: ids, and which of them were sampled."""

from __future__ import annotations

from ratchet.store.content.token_sequences import sampled_spans, sequences, token_call
from ratchet.store.records import Call, Choice, pack_ids, unpack_ids
from ratchet.store.states import CallState


def call(name: str, context: str, prompt: list[int], *answers: list[int], parent: tuple[str, int] = ("", 0)) -> Call:
    choices = tuple(
        Choice(index=k, finish_reason="stop", token_ids=pack_ids(ids), logprobs=b"") for k, ids in enumerate(answers)
    )
    return Call(
        id=name, trajectory_id="t", state=CallState.ANSWERED, alias="a", version=0, dialect="chat", streamed=False,
        linked_by="graph", parent_call=parent[0] or None, parent_choice=parent[1], role=None, sampling={},
        prompt_node="", tools_hash="", context=context, prompt_ids=pack_ids(prompt), prompt_tokens=0,
        completion_tokens=0, started_at=0.0, first_byte_at=None, ended_at=None, status=200, untrainable=None,
        error=None, choices=tuple(choices),
    )  # fmt: skip


def test_spans_name_the_sampled_ids_along_the_branch_that_was_taken() -> None:
    calls = [
        call("one", "root", [1, 2, 3], [10, 11], [12, 13, 14]),
        call("two", "exact", [4], [20], parent=("one", 1)),
        call("three", "exact", [5, 6], [30, 31], parent=("two", 0)),
    ]
    ids = unpack_ids(sequences(map(token_call, calls))["three", 0])
    spans = sampled_spans(calls, ("three", 0))
    assert [ids[a:b] for a, b in spans] == [(12, 13, 14), (20,), (30, 31)]
    assert spans[-1][1] == len(ids)


def test_a_fork_starts_a_new_sequence() -> None:
    calls = [call("one", "root", [1], [10]), call("two", "fork", [1, 9, 4], [20], parent=("one", 0))]
    assert sampled_spans(calls, ("two", 0)) == ((3, 4),)
