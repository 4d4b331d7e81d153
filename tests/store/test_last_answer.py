"""The last answer of a transcript with segments and branches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from ratchet.store.content.messages import parents_first
from ratchet.store.store import Store
from ratchet.trainer.rows.build_rows import build_rows
from tests.harness.records import call_start, ended

SYSTEM = {"role": "system", "content": "Plan."}
Message = dict[str, Any]


class PlacedCall(NamedTuple):
    id: str
    parent_call: str | None


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(
    store: Store, name: str, messages: list[Message], answer: str, at: float, context: str = "root", **more: Any
) -> None:
    start = call_start(name, "t", messages, at=at, **more)
    store.calls.ship([ended(start, assistant(answer), messages=messages, context=context)])


def shown(store: Store) -> list[str]:
    return [str(message["content"]) for message in store.trajectories.read("t").messages]


def test_a_compacted_context_ends_the_transcript(store: Store) -> None:
    call(store, "1", [SYSTEM, user("go")], "one", 1.0)
    call(store, "2", [SYSTEM, user("go"), assistant("one"), user("on")], "two", 2.0, parent_call="1")
    call(store, "3", [{"role": "system", "content": "Sum up."}, user("go, one, on, two")], "summary", 3.0)
    call(store, "4", [SYSTEM, user("summary")], "end", 4.0)
    assert shown(store) == ["Plan.", "summary", "end"]


@pytest.mark.parametrize("system", ["You are a reader.", "Plan."])
def test_a_sub_agent_does_not_end_the_transcript_of_its_parent(store: Store, system: str) -> None:
    first = [SYSTEM, user("go")]
    call(store, "1", first, "one", 1.0)
    sub = [{"role": "system", "content": system}, user("read")]
    call(store, "2", sub, "red", 2.0)
    call(store, "3", [*sub, assistant("red"), user("more")], "blue", 3.0, parent_call="2")
    call(store, "4", [*first, assistant("one"), user("red and blue")], "end", 4.0, parent_call="1")
    assert shown(store) == ["Plan.", "go", "one", "red and blue", "end"]


def test_a_title_requested_at_the_end_is_not_the_answer(store: Store) -> None:
    call(store, "1", [SYSTEM, user("go")], "end", 1.0)
    call(store, "2", [user("A title for: go, end")], "title", 2.0, tools_hash="", tools=b"")
    assert shown(store) == ["Plan.", "go", "end"]


def test_a_title_requested_at_the_start_is_not_the_answer(store: Store) -> None:
    call(store, "1", [{"role": "system", "content": "Titles."}, user("go")], "title", 1.0, tools_hash="", tools=b"")
    call(store, "2", [SYSTEM, user("go")], "one", 2.0)
    call(store, "3", [SYSTEM, user("go"), assistant("one"), user("on")], "end", 3.0, parent_call="2")
    assert shown(store) == ["Plan.", "go", "one", "on", "end"]
    assert store.trajectories.read("t").tools


def test_a_planner_without_tools_that_goes_on_ends_its_transcript(store: Store) -> None:
    first = [{"role": "system", "content": "Lead."}, user("go")]
    call(store, "1", first, "ask", 1.0, tools_hash="", tools=b"")
    call(store, "2", [SYSTEM, user("work")], "worked", 2.0)
    call(store, "3", [*first, assistant("ask"), user("worked")], "end", 3.0, tools_hash="", tools=b"", parent_call="1")
    assert shown(store) == ["Lead.", "go", "ask", "worked", "end"]


def test_the_branch_with_the_most_calls_is_shown_and_the_later_of_equal_ones(store: Store) -> None:
    first = [SYSTEM, user("go")]
    call(store, "1", first, "one", 1.0)
    call(store, "2", [*first, assistant("one"), user("a")], "two", 2.0, parent_call="1")
    call(store, "3", [*first, assistant("one"), user("b")], "two b", 3.0, parent_call="1")
    assert shown(store)[-1] == "two b"
    call(store, "4", [*first, assistant("one"), user("a"), assistant("two"), user("c")], "three", 4.0, parent_call="2")
    call(store, "5", [*first, assistant("one"), user("d")], "two d", 5.0, parent_call="1")
    assert shown(store)[-1] == "three"


def test_a_clock_that_is_set_back_leaves_the_last_answer_the_last(store: Store) -> None:
    first = [SYSTEM, user("go")]
    second = [*first, assistant("one"), user("on")]
    call(store, "1", first, "one", 100.0)
    call(store, "2", second, "two", 50.0, parent_call="1", context="exact")
    call(store, "3", [*second, assistant("two"), user("more")], "end", 51.0, parent_call="2", context="exact")
    transcript = store.trajectories.read("t")
    assert [str(message["content"]) for message in transcript.messages][-1] == "end"
    assert [one.id for one in transcript.calls] == ["1", "2", "3"]
    assert [one.id for one in store.trajectories.context_calls(transcript)] == ["1", "2", "3"]
    assert build_rows("t", transcript.calls, 1.0).untrained == {}
    (answers,) = store.resume_state.open_answers(0.0, 100)
    assert all(leaf.sequence for leaf in store.resume_state.open_leaves(answers))


def test_calls_follow_their_parents_and_otherwise_keep_their_order() -> None:
    def ordered(*calls: tuple[str, str | None]) -> str:
        return "".join(one.id for one in parents_first([PlacedCall(*names) for names in calls]))

    assert ordered(("a", None), ("b", "a"), ("c", None), ("d", "missing"), ("e", "a")) == "abcde"
    assert ordered(("b", "a"), ("c", "b"), ("d", None), ("a", None), ("e", "a")) == "dabce"
    assert ordered(("b", "a"), ("a", "b"), ("c", "c"), ("d", None)) == "dbac"
    chain = [PlacedCall(str(place), str(place + 1)) for place in range(5000)]
    assert [one.id for one in parents_first(chain)] == [one.id for one in reversed(chain)]
