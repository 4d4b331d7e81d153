"""The last answer of a transcript with segments and branches."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.store.store import Store
from tests.harness.records import call_start, ended

SYSTEM = {"role": "system", "content": "Plan."}
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(store: Store, name: str, messages: list[Message], answer: str, at: float, **more: Any) -> None:
    start = call_start(name, "t", messages, at=at, **more)
    store.calls.ship([ended(start, assistant(answer), messages=messages)])


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
