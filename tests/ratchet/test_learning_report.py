"""`ratchet status --report` reads the store and says what is known."""

from __future__ import annotations

import json
import re

import pytest

from ratchet.store.records import ToolCall, Verdict
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import open_store
from tests.harness.cli.project import Project
from tests.harness.records import answered_trajectory, call_start, commit_round, ended


def scored(project: Project, version: int, score: float, count: int) -> None:
    store = open_store(str(project.folder / "s.db"))
    names = [f"t{version}-{number}" for number in range(count)]
    for name in names:
        answered_trajectory(store, name, "Oslo", version=version, alias="policy")
    store.trajectories.seal_idle_trajectories("policy", now=100.0, idle_seconds=1.0)
    group = store.groups.create(f"k{version}", "policy", names, now=101.0)
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="j", judge_version="1", score=score + 0.1 * (number % 2))
        for number, name in enumerate(names)
    ]
    store.groups.record_verdicts(group.id, verdicts)
    store.close()


def unproven(project: Project, count: int, **metrics: float) -> None:
    """Rounds whose versions stay unproven."""
    store = open_store(str(project.folder / "s.db"))
    store.policies.register_base("policy", "policy")
    for version in range(1, count + 1):
        commit_round(store, "policy", version, checkpoint="x", metrics=metrics)
        store.policies.mark_unproven("policy", version, {}, reason=f"version {version} is lost in rounding")
    store.close()


def test_unproven_versions_are_the_first_line_of_the_report_and_not_known_yet_stands_once(project: Project) -> None:
    project.write(store="sqlite:///s.db", model="policy")
    scored(project, 0, 0.5, 40)
    unproven(project, 4)
    first, second, *_ = project.call("status", "--report").stdout.splitlines()
    assert first.startswith("4 versions unproven: version 4 is lost in rounding; ")
    assert "vllm.dtype, learner.dtype" in first
    assert second == "is it learning?  not known yet: two versions need scores; only version 0 has any"
    assert json.loads(project.call("status", "--report", "--json").stdout)["unproven"] == first


def test_status_begins_with_unproven_versions_and_shows_how_many_rows_a_round_rejected(project: Project) -> None:
    project.write(store="sqlite:///s.db", model="policy")
    unproven(project, 2, rows=128, rows_rejected=24)
    first, second, *rest = project.call("status").stdout.splitlines()
    assert first.startswith("2 versions unproven: version 2 is lost in rounding; ")
    assert second == "project default: down"
    assert "  last round    24 of 128 rows rejected (19%)" in rest
    found = json.loads(project.call("status", "--json").stdout)["store"]
    assert (found["unproven"]["versions"], found["rejected_rows"]["rejected"]) == ([1, 2], 24)


def test_each_agents_unproven_versions_stand_before_the_table_of_agents(project: Project) -> None:
    project.write(store="sqlite:///s.db", agents={"policy": {}, "mail": {}})
    unproven(project, 1)
    first, second, *_ = project.call("status").stdout.splitlines()
    assert first.startswith("1 version unproven: version 1 is lost in rounding; policy@1 serves nobody")
    assert second == "project default: down"


@pytest.mark.slow
def test_the_report_says_better_with_its_interval_and_draws_it(project: Project) -> None:
    project.write(store="sqlite:///s.db")
    scored(project, 0, 0.2, 40)
    early = project.call("status", "--report")
    assert "not known yet" in early.stdout
    scored(project, 1, 0.7, 40)
    report = json.loads(project.call("status", "--report", "--json").stdout)
    assert report["families"][0]["gain"]["verdict"] == "better"
    done = project.run("status", "--report", "--png", "curve.png")
    assert done.stdout.startswith("is it learning?  better")
    assert (project.folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_says_what_is_missing_and_that_rounds_move_nothing(project: Project) -> None:
    project.write(store="sqlite:///s.db")
    scored(project, 0, 0.5, 40)
    scored(project, 1, 0.5, 40)
    store = open_store(str(project.folder / "s.db"))
    unchanged = {"approx_kl": 2e-8, "approx_kl_tokens": 900, "logprob_change_positive_mean": 0.0, "learning_rate": 1e-5}
    for version in range(3):
        commit_round(store, "policy", version + 1, checkpoint="x", metrics=unchanged | {"dtype": "fp32"})
    store.close()
    output = project.call("status", "--report").stdout
    assert output.startswith("is it learning?  unknown")
    assert "missing: a larger difference, or more scores on both sides" in output
    assert re.search(r"before: @0 alone,.* 30 scores", output)
    assert re.search(r"steps are too small .*last 3 rounds .* 2e-08 nats", output)


def test_a_picture_needs_the_report(project: Project) -> None:
    assert project.run("status", "--png", "x.png").returncode == 2


def test_the_report_shows_how_long_each_tool_takes_by_version(project: Project) -> None:
    project.write(store="sqlite:///s.db")
    scored(project, 0, 0.5, 2)
    assert "tools:" not in project.call("status", "--report").stdout
    store = open_store(str(project.folder / "s.db"))
    store.policies.register_base("policy", "policy")
    answered_trajectory(store, "t", alias="policy")
    later = call_start("call_later", "t", at=1.75, parent_call="call_t", alias="policy")
    store.calls.ship([ended(later, {"role": "assistant", "content": "x"})])  # 0.25 s after the answer
    called = ToolCall(
        call_id="call_t", choice=0, place=0, alias="policy", version=0, tool="sea\x1b[2Jrch", tool_call_id="c",
        outcome=ToolOutcome.VALID, result=ToolResult.OK,
    )  # fmt: skip
    store.tools.record_tool_calls([called], [])
    store.trajectories.seal("t", now=9.0)
    store.close()
    text = project.call("status", "--report").stdout
    assert "\x1b" not in text
    assert re.search(r"@0 +sea.*rch +0\.33   0\.25 s, 0\.25 s \(n 1\)", text), text
    (tool,) = json.loads(project.call("status", "--report", "--json").stdout)["tools"]
    assert (tool["version"], tool["seconds"]) == (0, {"count": 1, "p50": 0.25, "p95": 0.25})
