"""`ratchet tune weights`: what it refuses, whose services it works in, and what it leaves."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from ratchet.cli import run
from ratchet.settings.load_settings import load, with_last_run
from ratchet.store.store import open_store
from tests.harness.cli.project import Project
from tests.harness.trainer.tiny import build_tiny_model

AGENT = "tests.harness.tuner.scripted_versions:agent"
JUDGE = "tests.harness.tuner.scripted_versions:judge"
SMALL = ("--rounds", "1", "--tasks-per-round", "2", "--attempts", "2", "--eval-tasks", "4", "--seed", "3")


@pytest.fixture
def tuned(project: Project) -> Project:
    """A project that can be tuned: a model that loads, an engine that answers, a task set, a judge."""
    model = build_tiny_model(project.folder / "tiny", hidden=32, layers=1)
    engine = {"command": [sys.executable, "-m", "tests.harness.proxy.scripted_vllm"]}
    project.write(
        base_model=str(model),
        vllm=project.content["vllm"] | engine,
        trainer={"judge": JUDGE},
        learner={"threads": 1},
        tuner={"workflow": AGENT, "tasks": "./tasks"},
    )
    (project.folder / "tasks").mkdir()
    for split, start in (("train", 0), ("test", 10)):
        rows = [json.dumps({"question": f"number {start + number}? #say=so"}) for number in range(6)]
        (project.folder / "tasks" / f"{split}.jsonl").write_text("\n".join(rows))
    return project


@pytest.mark.slow
def test_it_starts_the_services_where_nothing_runs_and_leaves_a_result_and_no_process(tuned: Project) -> None:
    done = tuned.run("tune", "weights", *SMALL, "--json", "--png", "curve.png", "--fail-unless-better", seconds=120)
    assert done.returncode == 3, done.stdout
    assert list((tuned.state / "run").glob("*.pid")) == []
    assert (tuned.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(done.stdout[done.stdout.index("\n{") :].rpartition("}")[0] + "}")
    assert (result["baseline"], result["details"]["rounds"]) == ("policy@0", 1)
    assert [one["round"] for one in result["details"]["curve"]] == [0, 1]
    store = open_store(str(tuned.state / "store.db"))
    (tuning,) = store.tunings.page("weights")
    assert (tuning.state, tuning.result) == ("done", result)
    assert len(store.rollouts.of_tuning(tuning.id)) == 4 + 1 + 2 * 2  # test, validation, training
    store.close()
    again = tuned.run("tune", "weights", "--resume", tuning.id, seconds=300)
    assert (again.returncode, "done" in again.stdout) == (1, True), again.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--warm-start-setting", "num_train_epochs=2"), "needs --warm-start"),
        (("--warm-start", "policy", "--warm-start-setting", "num_train_epochs"), "KEY=VALUE"),
        (("--warm-start", "policy", "--warm-start-setting", "num_epochs=2"), "warm_start.num_epochs"),
        (("--warm-start", "policy", "--warm-start", "policy"), "is listed twice"),
        (("--resume", "tun_1", "--tasks", "x"), "leave these options out"),
        (("--resume", "tun_1", "--family-workflow", f"tasks={AGENT}"), "leave these options out"),
        (
            ("--family-workflow", AGENT),
            "--family-workflow tests.harness.tuner.scripted_versions:agent: write KEY=VALUE",
        ),
        (("--attempts", "1"), "num_generations"),
        (("--tasks", "./nowhere"), "./nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_started(
    project: Project,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project.write(trainer={"judge": JUDGE}, tuner={"workflow": AGENT, "tasks": "./tasks"})
    monkeypatch.chdir(project.folder)
    assert run(["tune", "weights", *arguments]) != 0
    assert words in capsys.readouterr().err
    assert not project.state.exists()


@pytest.mark.parametrize(("given", "words"), [((), "give --judge"), (("--judge", JUDGE), "give --tasks")])
def test_without_a_judge_or_tasks_it_says_what_to_give(
    project: Project,
    given: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project.folder)
    assert run(["tune", "weights", "--workflow", AGENT, *given]) != 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [(f"math={AGENT}", "--family-workflow math: the task sets are tasks"), ("tasks=nowhere:run", "nowhere")],
)
def test_a_workflow_of_an_unknown_family_or_module_is_refused_before_anything_is_started(
    tuned: Project, given: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tuned.folder)
    assert run(["tune", "weights", "--family-workflow", given]) != 0
    assert words in capsys.readouterr().err
    assert not tuned.state.exists()


@pytest.mark.slow
def test_each_family_has_its_own_agent_and_its_own_judge(tuned: Project) -> None:
    shutil.copytree(tuned.folder / "tasks", tuned.folder / "others")
    judges = {"tasks": JUDGE, "others": {"kind": "workflow"}}
    (tuned.folder / "judge.yaml").write_text(json.dumps({"kind": "by_family", "judges": judges}))
    families = ("--tasks", "tasks=./tasks", "--tasks", "others=./others", "--judge", "judge.yaml")
    own = ("--family-workflow", "others=tests.harness.tuner.scripted_versions:rewards_itself")
    done = tuned.run("tune", "weights", *SMALL, *families, *own, "--json", seconds=300)
    assert done.returncode == 0, done.stdout
    store = open_store(str(tuned.state / "store.db"))
    (tuning,) = store.tunings.page("weights")
    made = store.rollouts.of_tuning(tuning.id)
    assert {one.task_id.partition("/")[0]: one.score for one in made if one.split == "test"} == {
        "tasks": 0,
        "others": 0.75,
    }
    assert {one.reward for one in made if one.task_id.startswith("tasks/")} == {None}
    assert tuning.result is not None
    assert tuning.result["workflow"] == f"{AGENT}; others=tests.harness.tuner.scripted_versions:rewards_itself"
    store.close()


def test_the_judge_that_a_project_was_started_with_judges_where_no_other_is_named(project: Project) -> None:
    file = project.state / "run" / "settings.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"trainer": {"judge": JUDGE, "num_generations": 4}}))
    options: dict[tuple[str, ...], tuple[str, str]] = {
        ("state_dir",): ("--state-dir", str(project.folder / ".ratchet"))
    }
    settings = load(project.folder / "ratchet.yaml", options, {})
    assert with_last_run(settings).given["trainer"] == {"judge": JUDGE}
    own = settings.changed(trainer={"judge": "mine:judge"})
    assert with_last_run(own).given["trainer"] == {"judge": "mine:judge"}


@pytest.mark.slow
def test_attempts_that_the_running_trainer_would_wait_for_more_of_are_refused(
    tuned: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned.up()
    monkeypatch.chdir(tuned.folder)
    assert run(["tune", "weights", *SMALL]) != 0
    assert "uses 8 rollouts per task" in capsys.readouterr().err
    done = tuned.run("tune", "weights", "--rounds", "0", "--eval-tasks", "4", seconds=60)
    assert done.returncode == 0, done.stdout  # it came to its end
    assert "on http://127.0.0.1" in done.stdout
    assert tuned.running()["ready"], "the services go on"
