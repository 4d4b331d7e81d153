"""Shipping: idempotent, complete, deduplicated, and never into a sealed trajectory."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from ratchet.store.calls.resume_state import AnswerName
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import unpack_ids, unpack_logprobs
from ratchet.store.states import CallState, TrajectoryState
from ratchet.store.store import Store
from tests.harness.records import QUESTION, TOOLS, answered_trajectory, call_start, ended, message_count, tool_call


def test_a_call_is_read_back_as_it_was_shipped(store: Store) -> None:
    start = call_start("call_1", "t1", task="find", role="planner", key_id="k1")
    end = ended(start, tool_call(), prompt=(7, 8), ids=(9, 10, 11))
    store.calls.ship([start, end])
    call = store.calls.read("call_1")
    assert call.state is CallState.ANSWERED
    assert unpack_ids(call.prompt_ids) == (7, 8)
    assert unpack_ids(call.choices[0].token_ids) == (9, 10, 11)
    assert unpack_logprobs(call.choices[0].logprobs) == (-6.25, -6.25, -6.25)
    assert call.choices[0].tool_call_ids == ("c1",)
    transcript = store.trajectories.read("t1")
    assert [message["role"] for message in transcript.messages] == ["system", "user", "assistant"]
    assert transcript.tools == tuple(TOOLS)
    assert transcript.trajectory.group_key == "task:find"


def test_shipping_twice_changes_nothing(store: Store) -> None:
    start = call_start("call_1", "t1")
    end = ended(start, tool_call())
    store.calls.ship([start, end])
    first = store.calls.read("call_1")
    store.calls.ship([end, start, end])
    assert store.calls.read("call_1") == first
    assert len(store.calls.page()) == 1


def test_an_end_alone_makes_the_whole_row(store: Store) -> None:
    store.calls.ship([ended(call_start("call_1", "t1"), tool_call())])
    assert store.calls.read("call_1").state is CallState.ANSWERED


def test_a_beginning_without_end_becomes_interrupted(store: Store) -> None:
    start = call_start("call_1", "t1")
    answered_trajectory(store, "t2")
    store.calls.ship([start])
    store.calls.mark_interrupted(["call_1", "call_t2"])
    assert store.calls.read("call_1").state is CallState.INTERRUPTED
    assert store.calls.read("call_t2").state is CallState.ANSWERED
    store.calls.ship([ended(start, tool_call())])  # the end was in another journal after all
    assert store.calls.read("call_1").state is CallState.ANSWERED


def test_a_call_reopens_a_trajectory_that_was_sealed_as_idle(store: Store) -> None:
    answered_trajectory(store, "t1")
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    store.calls.ship([call_start("call_2", "t1", at=101.0)])
    run = store.trajectories.get("t1")
    assert (run.state, run.calls, run.sealed_by) == (TrajectoryState.OPEN, 2, None)


def test_a_call_after_grouping_opens_a_successor(store: Store) -> None:
    answered_trajectory(store, "t1")
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    store.groups.create("k", "agent", ["t1"], now=100.0)
    store.calls.ship([call_start("call_2", "t1", at=101.0)])
    assert store.trajectories.get("t1").calls == 1
    assert store.trajectories.get("t1~1").state is TrajectoryState.OPEN


@pytest.mark.parametrize("changes", [{"version": 1}, {"purpose": "eval"}], ids=["version", "purpose"])
def test_a_trajectory_never_mixes_versions_or_purposes(store: Store, changes: dict[str, Any]) -> None:
    answered_trajectory(store, "t1")
    store.calls.ship([call_start("call_2", "t1", at=2.0, **changes)])
    assert (store.trajectories.get("t1").calls, store.trajectories.get("t1~1").calls) == (1, 1)
    both = [
        call_start("call_3", "t2", at=3.0),
        call_start("call_4", "t2", at=4.0, **changes),
        call_start("call_5", "t2", at=5.0),
    ]
    store.calls.ship(both)
    assert (store.trajectories.get("t2").calls, store.trajectories.get("t2~1").calls) == (2, 1)


def test_a_call_after_the_finish_opens_a_successor(store: Store) -> None:
    answered_trajectory(store, "t1")
    store.trajectories.seal("t1", now=9.0)
    for call_id in ("call_2", "call_3"):
        store.calls.ship([ended(call_start(call_id, "t1", parent_call="call_t1"), tool_call(), context="exact")])
    assert store.trajectories.get("t1~1").calls == 2
    assert store.trajectories.get("t1").calls == 1
    store.trajectories.seal("t1~1", now=10.0)
    store.calls.ship([call_start("call_4", "t1")])
    assert store.trajectories.get("t1~2").state is TrajectoryState.OPEN


def test_a_successor_can_read_the_context_that_it_continues(store: Store) -> None:
    answered_trajectory(store, "t1")
    store.trajectories.seal("t1", now=9.0)
    store.calls.ship([ended(call_start("call_2", "t1", parent_call="call_t1", at=5.0), tool_call(), context="exact")])
    found = store.trajectories.context_calls(store.trajectories.read("t1~1"))
    assert [call.id for call in found] == ["call_t1", "call_2"]


def test_a_history_that_is_sent_again_is_stored_once(store: Store) -> None:
    messages = list(QUESTION)
    for turn in range(5):
        start = call_start(f"call_{turn}", "t1", messages, at=float(turn))
        reply = {"role": "assistant", "content": f"answer {turn}"}
        store.calls.ship([ended(start, reply, messages=messages)])
        messages = [*messages, reply, {"role": "user", "content": f"more {turn}"}]
    assert len(store.trajectories.read("t1").messages) == 2 + 5 + 4
    assert message_count(store) == 2 + 5 + 4


def test_open_leaves_hold_the_whole_token_context(store: Store) -> None:
    store.calls.ship([ended(call_start("call_1", "t1"), tool_call(), prompt=(1, 2), ids=(3,))])
    second = call_start("call_2", "t1", parent_call="call_1", at=2.0)
    store.calls.ship([ended(second, tool_call(), prompt=(4,), ids=(5,), context="exact")])
    answered_trajectory(store, "gone")
    store.trajectories.seal("gone", now=9.0)
    (answers,) = store.resume_state.open_answers(0.0, 100)
    assert answers == {"t1": [("call_1", 0), ("call_2", 0)]}
    leaves = store.resume_state.open_leaves({"gone": [AnswerName("call_gone", 0)], **answers})
    assert [(leaf.call_id, unpack_ids(leaf.sequence)) for leaf in leaves] == [
        ("call_1", (1, 2, 3)),
        ("call_2", (1, 2, 3, 4, 5)),
    ]
    assert [leaf.extended for leaf in leaves] == [True, False]
    assert json.loads(leaves[0].reply)["tool_calls"][0]["id"] == "c1"
    assert [json.loads(body)["content"] for body in leaves[0].prompt_messages] == ["Where?", "Where?"]


def test_which_answers_are_continued_is_read_without_them(store: Store) -> None:
    store.calls.ship([ended(call_start("call_1", "t1"), tool_call())])
    second = call_start("call_2", "t1", parent_call="call_1", at=2.0)
    store.calls.ship([ended(second, tool_call(), context="exact"), ended(call_start("call_3", "t2"), tool_call())])
    assert store.resume_state.extended_answers(["t1", "t2"]) == {("call_1", 0)}
    assert store.resume_state.extended_answers(["t2"]) == set()


def test_above_the_limit_the_latest_answers_of_every_trajectory_are_restored(store: Store) -> None:
    starts = [call_start(f"call_{turn}{name}", name) for name in "abc" for turn in range(3)]
    store.calls.ship([ended(start, tool_call()) for start in starts])
    (answers,) = store.resume_state.open_answers(0.0, limit=4)
    found = [leaf.call_id for leaf in store.resume_state.open_leaves(answers)]
    assert sorted(found) == ["call_1c", "call_2a", "call_2b", "call_2c"]
    assert found.index("call_1c") < found.index("call_2c")


def test_answers_come_in_batches_of_whole_trajectories_with_few_queries(store: Store) -> None:
    shipped = []
    for number in range(400):
        first = call_start(f"call_{number:03}_1", f"t{number:03}", at=float(number))
        second = call_start(f"call_{number:03}_2", f"t{number:03}", parent_call=first.call_id, at=1000.0 - number)
        shipped += [ended(first, tool_call()), ended(second, tool_call(), context="exact")]
    store.calls.ship(shipped)
    statements: list[str] = []
    sa.event.listen(store._engine, "before_cursor_execute", lambda *found: statements.append(found[2]))
    found = store.resume_state.open_answers(0.0, 10_000)
    batches = [[leaf.trajectory_id for leaf in store.resume_state.open_leaves(batch)] for batch in found]
    assert [len(batch) for batch in batches] == [256, 256, 256, 32]
    oldest_first = [f"t{number:03}" for number in reversed(range(400)) for _ in range(2)]
    assert list(itertools.chain(*batches)) == oldest_first
    assert len([one for one in statements if one.startswith("SELECT")]) <= 1 + 4 * len(batches)


def test_open_attempts_are_those_that_nobody_repeated(store: Store) -> None:
    lost = {"call_1": "failed", "call_2": "aborted", "call_3": "refused", "call_4": "failed"}
    for number, (name, state) in enumerate(lost.items()):
        start = call_start(name, f"t{number}", at=float(number))
        failed = ended(start, tool_call(), ids=())
        store.calls.ship([msgspec.structs.replace(failed, state=CallState(state), status=200)])
    store.calls.ship([call_start("call_5", "t5", at=5.0)])
    store.calls.mark_interrupted(["call_5"])
    store.calls.ship([ended(call_start("call_6", "t3", at=6.0, linked_by="retry"), tool_call())])
    found = store.resume_state.unanswered_calls(since=0.0)
    assert [(one.trajectory_id, one.linked_by) for one in found] == [("t0", "root"), ("t1", "root"), ("t5", "root")]
    assert [one.trajectory_id for one in store.resume_state.unanswered_calls(since=4.0)] == ["t5"]


def test_pages_go_backwards_without_gaps(store: Store) -> None:
    for number in range(5):
        answered_trajectory(store, f"{number}", at=float(number))
    first = store.calls.page(limit=2)
    second = store.calls.page(limit=2, before=first[-1].id)
    assert [call.id for call in [*first, *second]] == ["call_4", "call_3", "call_2", "call_1"]
    assert [call.id for call in store.calls.page(trajectory="3")] == ["call_3"]


def test_an_unknown_call_is_an_error_with_its_id(store: Store) -> None:
    with pytest.raises(RecordNotFound, match="call_9"):
        store.calls.read("call_9")


def test_a_failed_batch_writes_nothing(store: Store) -> None:
    good = call_start("call_1", "t1")
    bad = msgspec.structs.replace(ended(call_start("call_2", "t2"), tool_call()), context="nonsense")
    with pytest.raises(Exception, match="context_known"):
        store.calls.ship([good, bad])
    assert store.calls.page() == []
