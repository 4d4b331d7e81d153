"""Tool calls in the store: recorded once, answered once, counted per tool and policy version."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from ratchet.store.calls import tool_call_outcomes
from ratchet.store.db.schema import calls
from ratchet.store.records import ToolCall, ToolCallResult
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory


def tool_call(place: int = 0, **changes: Any) -> ToolCall:
    """A valid tool call of the call `call_a`."""
    values: dict[str, Any] = {"call_id": "call_a", "choice": 0, "place": place, "alias": "agent", "version": 0}
    values |= {"tool": "search", "tool_call_id": f"id-{place}", "outcome": ToolOutcome.VALID}
    return ToolCall(**(values | changes))


def result_of(place: int, result: ToolResult) -> ToolCallResult:
    """What came of one."""
    return ToolCallResult(call_id="call_a", choice=0, tool_call_id=f"id-{place}", result=result)


def test_a_tool_call_is_recorded_and_answered_once(store: Store) -> None:
    answered_trajectory(store, "a")
    first, second = tool_call(0), tool_call(1, outcome=ToolOutcome.SCHEMA_VIOLATION, detail="$.n: type")
    assert store.tools.record_tool_calls([first, second], [result_of(1, ToolResult.ERROR)])[0] == [first, second]
    new, answered = store.tools.record_tool_calls(
        [first, second], [result_of(1, ToolResult.OK), result_of(0, ToolResult.EMPTY)]
    )
    assert new == []
    assert [(row.place, row.result) for row in answered] == [(0, ToolResult.EMPTY)]
    assert [row.result for row in store.tools.of_call("call_a")] == [ToolResult.EMPTY, ToolResult.ERROR]
    assert store.tools.of_call("call_a")[1].detail == "$.n: type"


def test_what_another_process_writes_at_the_same_moment_costs_no_other_row(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_trajectory(store, "a")
    store.tools.record_tool_calls([tool_call(0)], [])
    monkeypatch.setattr(tool_call_outcomes, "_without_known", lambda _, found: list(found))
    store.tools.record_tool_calls([tool_call(0), tool_call(1)], [result_of(1, ToolResult.OK)])
    assert [row.result for row in store.tools.of_call("call_a")] == [None, ToolResult.OK]


def test_a_result_belongs_to_the_choice_that_was_continued(store: Store) -> None:
    answered_trajectory(store, "a")
    store.tools.record_tool_calls([tool_call(0), tool_call(0, choice=1)], [result_of(0, ToolResult.OK)])
    assert [row.result for row in store.tools.of_call("call_a")] == [ToolResult.OK, None]


def test_tool_calls_of_a_call_that_is_not_there_are_left_out(store: Store) -> None:
    assert store.tools.record_tool_calls([tool_call()], [result_of(0, ToolResult.OK)]) == ([], [])


def test_tool_calls_leave_with_their_call(store: Store) -> None:
    answered_trajectory(store, "a")
    store.tools.record_tool_calls([tool_call()], [])
    with store._engine.begin() as connection:
        connection.execute(sa.delete(calls))
    assert store.tools.counts_by_version() == []


def test_the_tally_is_per_alias_version_and_tool(store: Store) -> None:
    answered_trajectory(store, "a")
    rows = [tool_call(place, tool="ls", outcome=ToolOutcome.INVALID_JSON) for place in range(3)]
    rows += [tool_call(3), tool_call(4, version=2)]
    store.tools.record_tool_calls(rows, [result_of(3, ToolResult.TIMEOUT)])
    found = [
        (one.version, one.tool, one.calls, one.outcomes, one.results) for one in store.tools.counts_by_version("agent")
    ]
    assert found == [
        (0, "ls", 3, {"invalid_json": 3}, {}),
        (0, "search", 1, {"valid": 1}, {"timeout": 1}),
        (2, "search", 1, {"valid": 1}, {}),
    ]
    assert [one.version for one in store.tools.counts_by_version("agent", 2)] == [2]
    assert store.tools.counts_by_version("other") == []


def test_an_outcome_that_nobody_knows_is_refused(store: Store) -> None:
    answered_trajectory(store, "a")
    with pytest.raises(sa.exc.IntegrityError):
        store.tools.record_tool_calls([tool_call(outcome="fine")], [])
