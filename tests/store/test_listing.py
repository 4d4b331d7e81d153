"""The lists: every filter finds what it says, page by page, without gaps and without reading the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from ratchet.store.calls.trajectory_filter import FEW, TrajectoryFilter, count_without_tag, select_page_ids
from ratchet.store.db.engine import connect
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import ToolCall, Verdict
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory

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
