"""A judge of a notebook in a running project: its process is killed in the middle of a run, which is then resumed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import ratchet
from ratchet.store.states import RolloutState
from ratchet.store.store import open_store
from tests.harness.cli.project import ROOT, Project, wait_for

pytestmark = pytest.mark.slow

CELL = """
import os, pathlib, sys, threading
import ratchet
from tests.harness.tuner.scripted_versions import agent

FIRST, *_ = sys.argv[1:] or [""]
calls = 0

async def workflow(task, base_url, model):
    return await agent(task, base_url, model)

def judge(trajectory, response):
    global calls
    calls += 1
    with open("judged.txt", "a") as file:
        print(trajectory["id"], file=file)
    if not FIRST and calls == 5:  # after two test tasks, one validation task and the first training rollout
        pathlib.Path("blocked").touch()
        threading.Event().wait()
    return (calls % 3) / 2

run = ratchet.tune(
    workflow, judge, "tasks", rounds=2, tasks_per_round=2, attempts=2, eval_tasks=2, validation_tasks=1,
    resume=FIRST or None,
)
pathlib.Path("run.id").write_text(run.id)
run.wait(300)
print(run.status)
"""


@pytest.fixture
def running(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A running project whose trainer has another judge."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    trainer = {"judge": {"kind": "workflow"}, "num_generations": 2, "groups_per_round": 2, "judge_retry_seconds": 0.2}
    project.make_trainable(trainer=trainer)
    (project.folder / "cell.py").write_text(CELL)
    project.up()
    return project


@contextmanager
def cell(project: Project, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the notebook's cell in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "cell.py", *arguments], cwd=project.folder, env=os.environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_verdicts_wait_for_a_killed_notebook_and_the_resumed_run_scores_everything_once(
    running: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cell(running) as first:
        wait_for(
            "the judge is in the middle of its work",
            lambda: (running.folder / "blocked").exists() or first.poll() is not None,
            seconds=120,
        )
        assert first.poll() is None, first.communicate()[0]
        first.kill()
        first.communicate()
    run = (running.folder / "run.id").read_text()
    remedy = f"run the cell again with resume={run!r}"
    with open_store(str(running.state / "store.db")) as store:
        wait_for(
            "the trainer waits",
            lambda: any("is away" in alarm.reason and remedy in alarm.reason for alarm in store.alarms.active()),
            seconds=120,
        )
        wait_for("the run counts as interrupted", lambda: run not in store.tunings.led(), seconds=120)
    listed = running.call("tune", "runs").stdout
    assert f"interrupted: its process is gone, and its rollouts wait for its judge; {remedy}" in listed
    assert f"run {run} (weights, policy) interrupted" in running.call("status").stdout
    refused = running.call("tune", "weights", "--resume", run)
    assert refused.returncode == 2
    assert "is judged by __main__:judge of the process that began it: resume it in Python" in refused.stdout
    monkeypatch.chdir(running.folder)
    with pytest.raises(ratchet.InvalidArgument, match="is judged by __main__:judge"):
        ratchet.tune("cell:workflow", None, "tasks", resume=run)
    with cell(running, run) as second:
        output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert "RunStatus(state='done'" in output

    with open_store(str(running.state / "store.db")) as store:
        made = [one for one in store.rollouts.of_tuning(run) if one.state is RolloutState.ENDED]
        trained = [one.id for one in made if one.purpose == "live"]
        verdicts = store.groups.verdicts(trained)
        assert [alarm.name for alarm in store.alarms.active() if "is away" in alarm.reason] == []
    assert len(trained) == 2 * 2 * 2
    assert verdicts.keys() == set(trained)
    assert {one.judge for one in verdicts.values()} == {"caller:__main__:judge"}
    assert {one.failure for one in verdicts.values()} == {None}
    with closing(sqlite3.connect(running.state / "store.db")) as database:
        rows = Counter(name for (name,) in database.execute("SELECT trajectory_id FROM verdicts"))
    assert {rows[name] for name in trained} == {1}
    requested = Counter((running.folder / "judged.txt").read_text().split())
    assert sorted(requested[one.id] for one in made)[-2:] == [
        1,
        2,
    ]  # only the one that the killed process did not answer
    assert requested.keys() == {one.id for one in made}
    assert list((running.state / "run" / "judges").iterdir()) == []
