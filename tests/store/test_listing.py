"""Lists of trajectories and the last answer of a transcript."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from ratchet.store.calls.trajectory_filter import FEW, TrajectoryFilter, count_without_tag, select_page_ids
from ratchet.store.content.messages import parents_first
from ratchet.store.db.engine import connect
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import ToolCall, Verdict
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from ratchet.trainer.rows.build_rows import build_rows
from tests.harness.records import answered_trajectory, call_start, ended

RUNS: dict[str, dict[str, Any]] = {
    "t0": {"at": 1.0, "alias": "mail", "task": "find/1", "key_id": "k1", "tags": ("red", "big")},
    "t1": {"at": 2.0, "alias": "mail", "task": "find/2", "key_id": "k2", "tags": ("red",), "role": "planner"},
    "t2": {"at": 2.0, "alias": "chat", "version": 3, "key_id": "k1", "tags": ("blue", "red")},
    "u3": {"at": 4.0, "alias": "chat", "version": 4, "task": "find/1"},
}
FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["u3", "t2", "t1", "t0"]),
    ({"state": "sealed"}, ["t1"]),
    ({"alias": "mail"}, ["t1", "t0"]),
    ({"alias": "chat", "version": 3}, ["t2"]),
    ({"alias": "mail", "state": "open"}, ["t0"]),
    ({"task": "find/1"}, ["u3", "t0"]),
    ({"key": "k1"}, ["t2", "t0"]),
    ({"tag": "red"}, ["t2", "t1", "t0"]),
    ({"tag": "red", "alias": "mail", "state": "open"}, ["t0"]),
    ({"tag": "red", "since": 1.5, "until": 9.0}, ["t2", "t1"]),
    ({"tag": "red", "until": 2.0}, ["t0"]),
    ({"tag": "red", "alias": "mail", "since": 1.5}, ["t1"]),
    ({"since": 2.0}, ["u3", "t2", "t1"]),
    ({"since": 2.0, "until": 4.0}, ["t2", "t1"]),
    ({"search": "t"}, ["t2", "t1", "t0"]),
    ({"search": "t", "tag": "blue"}, ["t2"]),
    ({"search": "%"}, []),
    ({"task": "nothing"}, []),
    ({"role": "planner"}, ["t1"]),
    ({"role": "planner", "alias": "chat"}, []),
    ({"scored": True}, ["t2", "t1"]),
    ({"scored": False}, ["u3", "t0"]),
    ({"min_score": 0.5}, ["t2"]),
    ({"min_score": 0.0, "max_score": 0.5}, ["t1"]),
    ({"tool": "search"}, ["t2", "t0"]),
    ({"tool": "search", "outcome": "invalid_json"}, ["t0"]),
    ({"outcome": "timeout"}, ["t2"]),
    ({"outcome": "timeout", "role": "planner"}, []),
    ({"round": "rnd_1"}, []),
]


@pytest.fixture
def filled(store: Store) -> Store:
    for name, values in RUNS.items():
        answered_trajectory(store, name, **values)
    store.trajectories.seal("t1", now=9.0)
    # The latest score counts; a failed judgement is none.
    scores = [("t1", 0.9), ("t1", 0.25), ("t2", 1.0)]
    verdicts = [_verdict(name, score) for name, score in scores]
    failed = _verdict("u3", None)
    store.groups.replace_verdicts([*verdicts, failed])
    store.tools.record_tool_calls(
        [_tool_call("t0", ToolOutcome.INVALID_JSON), _tool_call("t2", ToolOutcome.VALID, ToolResult.TIMEOUT)], []
    )
    return store


def _verdict(name: str, score: float | None) -> Verdict:
    failure = "it was away" if score is None else None
    return Verdict(trajectory_id=name, group_id=None, judge="rule", judge_version="1", score=score, failure=failure)


def _tool_call(name: str, outcome: ToolOutcome, result: ToolResult | None = None) -> ToolCall:
    return ToolCall(call_id=f"call_{name}", choice=0, place=0, alias="mail", version=0, tool="search",
                    tool_call_id="c", outcome=outcome, result=result)  # fmt: skip


@pytest.mark.parametrize(("chosen", "expected"), FILTERS, ids=[str(chosen) for chosen, _ in FILTERS])
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_every_filter_finds_what_it_says_without_gaps(
    filled: Store, chosen: dict[str, Any], expected: list[str], limit: int
) -> None:
    seen: list[str] = []
    while page := filled.trajectories.page(limit, seen[-1] if seen else None, chosen=TrajectoryFilter(**chosen)):
        seen += [run.id for run in page]
    assert seen == expected


@pytest.mark.parametrize(
    ("chosen", "by_tag"),
    [(chosen, True) for chosen, _ in FILTERS if chosen]
    + [(chosen, False) for chosen, _ in FILTERS if count_without_tag(TrajectoryFilter(**chosen)) is not None],
    ids=str,
)
def test_no_filter_reads_the_whole_table(filled: Store, store_url: str, chosen: dict[str, Any], by_tag: bool) -> None:
    engine = connect(store_url)
    ids = select_page_ids(TrajectoryFilter(**chosen), 10, "t2", 2.0, by_tag=by_tag)
    query = ids.compile(engine, compile_kwargs={"literal_binds": True})
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            rows = connection.execute(sa.text(f"EXPLAIN QUERY PLAN {query}")).all()
            plan = " ".join(str(row[-1]) for row in rows)
            assert "SCAN" not in plan, plan
        else:
            connection.execute(sa.text("SET enable_seqscan = off"))
            plan = " ".join(connection.scalars(sa.text(f"EXPLAIN {query}".replace(":", "\\:"))))
            assert "Seq Scan" not in plan, plan
    engine.dispose()


def test_the_rest_of_a_filter_by_tag_is_counted_no_further_than_it_matters(filled: Store, store_url: str) -> None:
    engine = connect(store_url)
    count = count_without_tag(TrajectoryFilter(tag="red", alias="mail"))
    assert count_without_tag(TrajectoryFilter(tag="red")) is None
    assert count_without_tag(TrajectoryFilter(tag="red", since=1.0)) is None
    assert count_without_tag(TrajectoryFilter(alias="mail")) is None
    assert count is not None
    assert str(FEW + 1) in str(count.compile(engine, compile_kwargs={"literal_binds": True}))
    with engine.connect() as connection:
        assert connection.scalar(count) == 2
    engine.dispose()


def test_a_value_that_no_column_holds_is_no_failure(filled: Store) -> None:
    with pytest.raises(RecordNotFound):
        filled.trajectories.page(chosen=TrajectoryFilter(version=2**70))
    with pytest.raises(RecordNotFound):
        filled.trajectories.page(before="gone")


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
