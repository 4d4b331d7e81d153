"""`ratchet tune select-model` end to end: a real proxy, scripted models, the command as a process."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.tuner.reports import read
from tests.harness.chat_models import ScriptedModel
from tests.harness.cli.project import INTERRUPTED, Project
from tests.harness.proxy.servers import eventually
from tests.harness.tuner.model_project import TASKS, model_project


@dataclass
class SelectionProject:
    """The commands in a project with other models."""

    project: Project
    store: Store
    models: ScriptedModel

    def select(self, *candidates: str, judge: str = "exact", **given: Any) -> Any:
        """Run the command to its end."""
        named = [word for name in candidates for word in ("--candidate", name)]
        return self.project.run("tune", "select-model", *named, *self.arguments(judge, **given), seconds=120)

    def arguments(self, judge: str = "exact", **given: Any) -> list[str]:
        options = {
            "tasks": "sums", "workflow": "tests.harness.tuner.workflows:ask",
            "judge": f"tests.harness.tuner.judges:{judge}", **given,
        }  # fmt: skip
        words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
        return [word for pair in words for word in pair]


@pytest.fixture
def circle(project: Project) -> Iterator[SelectionProject]:
    with model_project(project) as made:
        yield SelectionProject(project, made.store, made.models)


@pytest.mark.slow
def test_the_best_is_chosen_and_a_crashing_candidate_is_reported_and_stops_no_other(circle: SelectionProject) -> None:
    done = circle.select("right-20", "right-95", "crash", png="models.png")
    assert done.returncode == 0, done.stdout
    assert "EVERY ROLLOUT OF crash FAILED: InternalServerError: Error code: 500" in done.stdout
    assert f"({TASKS} of {TASKS})" in done.stdout
    assert "chosen: right-95: " in done.stdout
    assert (circle.project.folder / "models.png").read_bytes().startswith(b"\x89PNG")
    (run,) = circle.store.tunings.page()
    result = read(run.result or {})
    assert (result.baseline, result.best, result.promoted) == ("right-20", "right-95", None)
    assert result.gain is not None
    assert result.gain.low > 0.4
    assert (result.spent.rollouts, result.spent.prompt_tokens) == (3 * TASKS, 2 * 20 * TASKS)
    assert result.spent.money.amount == pytest.approx(25 * TASKS * 1e-5)  # the others have no price
    assert not result.spent.money.known
    report = circle.project.run("tune", "report").stdout
    assert "paired comparison of 3 models" in report
    assert "better" in report


@pytest.mark.slow
def test_a_candidate_that_the_proxy_does_not_know_is_refused_before_anything_runs(circle: SelectionProject) -> None:
    done = circle.select("right-95", "gpt-9", "policy@7")
    assert done.returncode == 1
    assert re.search(r"gpt-9, policy@7: .* serves policy", done.stdout)
    assert circle.models.requests == []
    assert circle.store.tunings.page() == []


@pytest.mark.slow
def test_the_live_version_is_measured_alone_unless_another_one_is_named(circle: SelectionProject) -> None:
    arguments = circle.arguments(limit=4)
    found = circle.project.json("eval", "--model", "policy@0", *arguments, seconds=120)
    assert [one["candidate"] for one in found["ranking"]["scores"]] == ["policy@0"]
    assert "verdict" not in found
    refused = circle.project.run("eval", "--model", "policy@0", "--against", "policy", *arguments, seconds=120)
    assert (refused.returncode, "policy@0 is given twice" in refused.stdout) == (1, True)


@pytest.mark.slow
def test_an_evaluation_of_two_ends_with_what_it_shows(circle: SelectionProject) -> None:
    arguments = [*circle.arguments(limit=12), "--json"]
    better = circle.project.run("eval", "--model", "right-95", "--against", "right-20", *arguments)
    assert better.returncode == 0, better.stdout
    result = json.loads(better.stdout[better.stdout.index("{") :])
    assert (result["verdict"], result["pair"]["candidate"], result["pair"]["tasks"]) == ("better", "right-95", 12)
    worse = circle.project.run("eval", "--model", "policy@0", "--against", "right-95", *arguments)
    assert worse.returncode == 4, worse.stdout
    nothing = circle.project.run("eval", "--model", "policy@0", "--against", "right-95", *circle.arguments(
        limit=2, workflow="tests.harness.tuner.workflows:crashes"))  # fmt: skip
    assert nothing.returncode == 1, nothing.stdout
    assert [run.kind for run in circle.store.tunings.page()] == ["eval", "eval", "eval"]
    assert "no tuning run" in circle.project.run("tune", "report").stdout


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(circle: SelectionProject) -> None:
    named = ["--candidate", "right-95", "--candidate", "right-20", "--concurrency", "1"]
    process = circle.project.start("tune", "select-model", *named, *circle.arguments())
    eventually(lambda: len(circle.models.requests) >= 10)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in INTERRUPTED
    (run,) = circle.store.tunings.page()
    assert run.state == "stopped"
    ended = {one.id for one in circle.store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}
    count = len(circle.models.requests)
    done = circle.project.run("tune", "select-model", "--resume", run.id, seconds=120)  # the command printed on Ctrl-C
    assert "chosen: right-95" in done.stdout
    again = circle.store.rollouts.of_tuning(run.id)
    assert ended <= {one.id for one in again}
    over = [one for one in again if one.state is RolloutState.ENDED]
    assert len(over) == len({(one.candidate, one.task_id) for one in over}) == 2 * TASKS
    assert len(circle.models.requests) - count == 2 * TASKS - len(ended)
    other = circle.project.run("tune", "select-model", "--resume", run.id, *circle.arguments("never_content"))
    assert "use the same judge " in other.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidate", "a"], "at least two candidates"),
        (["--candidate", "a", "--candidate", "b", "--policy", "cheapest"], "cheapest needs --within X"),
        (["--candidate", "a", "--candidate", "b", "--score-range", "1", "0"], "LOW must be below HIGH"),
    ],
)
def test_invalid_arguments_are_refused(project: Project, arguments: list[str], message: str) -> None:
    done = project.run("tune", "select-model", *arguments)
    assert done.returncode == 2
    assert message in done.stdout


def test_without_scipy_it_is_refused_before_anything_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    done = project.call("tune", "select-model", "--candidate", "a", "--candidate", "b", "--workflow", "mine:run")
    assert done.returncode == 1
    assert "comparing candidates needs scipy" in done.stdout
