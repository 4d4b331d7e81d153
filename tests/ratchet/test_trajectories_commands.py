"""`ratchet trajectories`: lists by page and filter, one shown whole; nothing that was recorded steers a terminal."""

from __future__ import annotations

import json

import pytest

from ratchet.store.records import VersionDraw
from ratchet.store.store import open_store
from tests.harness.cli.project import Project
from tests.harness.records import QUESTION, call_start, ended, judged_group, tool_call


@pytest.fixture
def url(project: Project) -> str:
    """A store with a judged group of two, and a trajectory with a tool call and a hostile answer."""
    file = str(project.folder / "filled.db")
    store = open_store(file)
    judged_group(store, ["a", "b"], [0.0, 1.0])
    first = call_start("call_1", "talk", QUESTION, at=5000.0, draw=VersionDraw(shares={0: 0.1, 1: 0.9}))
    later = [*QUESTION, tool_call(), {"role": "tool", "content": "found", "tool_call_id": "c1"}]
    second = call_start("call_2", "talk", later, at=5001.0, parent_call="call_1", linked_by="graph")
    hostile = {"role": "assistant", "content": "Oslo\x1b]0;owned\x07 [red]not markup[/red]"}
    store.calls.ship(
        [
            ended(first, tool_call(), messages=QUESTION, prompt=(1, 2, 3), ids=(4, 5)),
            ended(second, hostile, messages=later, prompt=(6,), ids=(7, 8, 9), context="exact"),
        ]
    )
    store.close()
    return file


@pytest.mark.slow
def test_trajectories_are_listed_newest_first_with_their_scores_page_by_page(project: Project, url: str) -> None:
    found = json.loads(project.call("trajectories", "list", "--store", url, "--json").stdout)
    assert found[0]["id"] == "talk"
    assert found[0]["draw"] == {"shares": {"0": 0.1, "1": 0.9}, "unit": None, "counted": True}
    assert {one["id"]: one["score"] for one in found} == {"talk": None, "a": 0.0, "b": 1.0}
    page = project.call("trajectories", "list", "--store", url, "--limit", "1").stdout
    assert "next page: --before talk" in page
    assert "talk" not in project.call("trajectories", "list", "--store", url, "--before", "talk").stdout


@pytest.mark.slow
def test_the_filter_is_that_of_the_export(project: Project, url: str) -> None:
    open_ones = json.loads(project.call("trajectories", "list", "--store", url, "--state", "open", "--json").stdout)
    assert [one["id"] for one in open_ones] == ["talk"]
    assert "no trajectory matches" in project.call("trajectories", "list", "--store", url, "--task", "none").stdout


def test_one_is_shown_with_messages_calls_and_tool_calls_and_steers_no_terminal(project: Project, url: str) -> None:
    shown = project.call("trajectories", "show", "talk", "--store", url).stdout
    assert "linked by graph, context exact" in shown
    assert '-> search({"a": 1})' in shown
    assert "[red]not markup[/red]" in shown
    assert "\x1b" not in shown
    scored = project.call("trajectories", "show", "b", "--store", url).stdout
    assert "score    1 by" in scored


@pytest.mark.slow
def test_as_json_it_is_what_the_export_writes(project: Project, url: str) -> None:
    record = json.loads(project.call("trajectories", "show", "talk", "--store", url, "--json").stdout)
    assert [row["input_ids"] for row in record["rows"]] == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert project.call("trajectories", "show", "nobody", "--store", url).returncode == 1
