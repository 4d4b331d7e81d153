"""`ratchet tune report` and `runs`: the table, JSON, Markdown and the picture say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.store.store import open_store
from ratchet.trainer.statistics import compare
from ratchet.tuner.reports import Method, TuningResult, plain, task_set
from ratchet.tuner.rollouts.prices import UNKNOWN, RolloutCost
from tests.harness.cli.project import Project

TASKS = [f"task{number}" for number in range(12)]


def result(method: Method, score: float, **changes: Any) -> TuningResult:
    """A run whose best had this score at every task, and what served before had none."""
    values: dict[str, Any] = {
        "technique": "GRPO, 3 rounds", "alias": "policy", "task_set": task_set("tasks/", "test", TASKS), "judge": "j:1",
        "workflow": "w", "baseline": "old", "best": "new", "wall_seconds": 90.0, "notes": ("as it was",),
        "gain": compare(dict.fromkeys(TASKS, (score,)), dict.fromkeys(TASKS, (0.0,)), names=("new", "old")),
        "spent": RolloutCost(prompt_tokens=1000, completion_tokens=234, money=UNKNOWN),
    }  # fmt: skip
    return TuningResult(method=method, **(values | changes))


@pytest.fixture
def tuned(project: Project) -> Project:
    """A project where weights were tuned, with success, and a prompt was tried."""
    project.write(store="sqlite:///s.db")
    store = open_store(str(project.folder / "s.db"))
    results = [result("prompt", 0.0, technique="a|b"), result("weights", 1.0, promoted="policy@1")]
    for one in results:
        store.tunings.end(store.tunings.begin(one.method, "policy", {}).id, "done", plain(one))
    store.tunings.begin("select-model", "policy", {})
    store.close()
    return project


@pytest.mark.slow
def test_the_three_methods_stand_side_by_side(tuned: Project) -> None:
    done = tuned.run("tune", "report", "--png", "gains.png")
    assert done.returncode == 0
    for text in (
        "policy on 12 tasks of tasks/ (test), judged by j:1", "+1.000", "better", "no difference", "1,234", "unknown",
        "no longer policy@1", "not this", "ratchet tune select-model", "Model weights: as it was", "has not ended",
    ):  # fmt: skip
        assert text in done.stdout, text
    assert (tuned.folder / "gains.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_json_and_markdown_say_the_same(tuned: Project) -> None:
    report = json.loads(tuned.run("tune", "report", "--json").stdout)
    weights = report["rows"][2]
    assert (weights["effect"]["difference"], weights["spent"]["money"]["known"]) == (1.0, False)
    assert [one["why"] for one in report["excluded"]] == ["it has not ended"]
    lines = tuned.run("tune", "report", "--markdown").stdout.splitlines()
    assert lines[2].startswith("| method | technique |")
    assert {line.replace("\\|", "").count("|") for line in lines[2:7]} == {lines[2].count("|")}


@pytest.mark.slow
def test_a_report_on_nothing_says_so_and_fails(project: Project) -> None:
    project.write(store="sqlite:///s.db")
    project.run("store", "migrate")
    done = project.run("tune", "report")
    assert done.returncode == 1
    assert "no tuning run" in done.stdout


@pytest.mark.slow
def test_a_report_on_what_nobody_ran_says_in_one_line_what_there_is(tuned: Project) -> None:
    done = tuned.run("tune", "report", "--model", "nope", "--judged-by", "j")
    assert done.returncode == 1
    assert done.stdout.strip() == (
        "ratchet: no finished run is of --model nope --judged-by j; there are runs of --model policy; --tasks tasks/; "
        "--judged-by j:1"
    )


@pytest.mark.slow
def test_runs_are_listed_newest_first(tuned: Project) -> None:
    lines = tuned.run("tune", "runs").stdout.splitlines()
    assert [line.split()[1:3] for line in lines] == [
        ["select-model", "running"],
        ["weights", "done"],
        ["prompt", "done"],
    ]
    run = lines[0].split()[0]
    assert lines[0].endswith(f"interrupted: its process is gone; `ratchet tune select-model --resume {run}` resumes it")
    assert f"run {run} (select-model, policy) interrupted: its process is gone;" in tuned.run("status").stdout
    store = open_store(str(tuned.folder / "s.db"))
    store.leases.acquire(f"tuning:{run}", "host:1_06f3", 60.0)
    store.close()
    assert tuned.run("tune", "runs", "--limit", "1").stdout.strip().endswith("running")
    runs = json.loads(tuned.run("tune", "runs", "--method", "weights", "--json").stdout)
    assert [one["kind"] for one in runs] == ["weights"]
