"""Every example is a folder that can be run: its settings load, its judge imports, and it knows no room."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import click
import pytest

from ratchet.cli import cli
from ratchet.settings.load_settings import load
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.tasks.task_set import TaskSet

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/ratchet.yaml"))
ROOMS = {"ratchet", "proxy", "store", "trainer", "tests", "benchmarks"}


def test_the_examples_are_all_here() -> None:
    assert FOLDERS == ["email_search", "math", "planner", "production", "reward_hacking"]


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_has_settings_that_load_a_judge_that_imports_and_a_readme_that_names_them(name: str) -> None:
    settings = load(EXAMPLES / name / "ratchet.yaml", environ={})
    trainer = settings.trainer_settings()
    assert make_judge(trainer.judge, {}).version
    assert settings.base_model is not None
    assert (EXAMPLES.parent / settings.base_model / "model.safetensors").is_file()
    readme = (EXAMPLES / name / "README.md").read_text("utf-8")
    assert "## " in readme
    assert f"examples/{name}" in readme or f"examples.{name}" in readme


@pytest.mark.parametrize("name", ["math", "planner"])
def test_the_task_set_and_the_workflow_that_the_settings_name_are_there(name: str) -> None:
    tuner = load(EXAMPLES / name / "ratchet.yaml", environ={}).tuner_settings()
    assert tuner.tasks is not None
    tasks = TaskSet.open(EXAMPLES.parent / tuner.tasks)
    assert tasks.splits() == ("train", "test")
    assert [set(row) for row in tasks.preview("test")] == [{"id", "question", "answer"}] * 2
    assert (EXAMPLES / name / "workflow.py").is_file()
    assert tuner.workflow == f"examples.{name}.workflow:workflow"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("**/*.py")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_no_file_of_an_example_imports_a_room(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").split(".")[0])
    assert not imported & ROOMS


@pytest.mark.parametrize("name", FOLDERS)
def test_every_command_that_a_readme_shows_can_be_given(name: str) -> None:
    readme = (EXAMPLES / name / "README.md").read_text("utf-8").replace("\\\n", " ")
    shown = [line.split("#")[0] for line in readme.splitlines() if line.startswith("    ratchet ")]
    assert shown
    for line in shown:
        words = shlex.split(line)[1:]
        words = words[2:] if words[0] == "--config" else words
        command: click.Command = cli
        context = click.Context(cli)
        while isinstance(command, click.Group) and not words[0].startswith("--"):
            found = command.get_command(context, words.pop(0))
            assert found is not None, line
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
