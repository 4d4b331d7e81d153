"""Every example is a folder that can be run: its settings load, its judge imports, and it uses no Ratchet."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from ratchet.cli import cli
from ratchet.settings.load_settings import load
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.tasks import TaskSet

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
THE_DEMOS_AGENT = "ratchet.demo.email_search"
NOT_FOR_EXAMPLES = {"ratchet", "proxy", "store", "trainer", "tuner", "tests", "benchmarks"}


def settings_file(name: str) -> Path:
    """Return the settings of an example; those of email_search are in the package, with the demo's agent."""
    demo = EXAMPLES.parent.joinpath(*THE_DEMOS_AGENT.split("."))
    return (demo if name == demo.name else EXAMPLES / name) / "ratchet.yaml"


def started_in(name: str) -> Path:
    """Return the folder where the commands of an example are given: verifiers finds a taskset in the current one."""
    return EXAMPLES / name if name == "verifiers" else EXAMPLES.parent


def test_the_examples_are_all_here() -> None:
    assert FOLDERS == ["email_search", "math", "planner", "production", "reward_hacking", "verifiers"]
    assert all(settings_file(name).is_file() for name in FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_has_settings_that_load_a_judge_that_imports_and_a_readme_that_names_them(name: str) -> None:
    settings = load(settings_file(name), environ={})
    trainer = settings.trainer
    assert make_judge(trainer.judge, {}).version
    assert settings.base_model is not None
    assert (started_in(name) / settings.base_model / "model.safetensors").is_file()
    readme = (EXAMPLES / name / "README.md").read_text("utf-8")
    assert "## " in readme
    assert f"examples/{name}" in readme or f"examples.{name}" in readme


@pytest.mark.parametrize("name", ["math", "planner"])
def test_the_task_set_and_the_workflow_that_the_settings_name_are_there(name: str) -> None:
    tuner = load(EXAMPLES / name / "ratchet.yaml", environ={}).tuner
    assert tuner.tasks is not None
    tasks = TaskSet.open(EXAMPLES.parent / tuner.tasks)
    assert tasks.splits() == ("train", "test")
    assert [set(row) for row in tasks.preview("test")] == [{"id", "question", "answer"}] * 2
    assert (EXAMPLES / name / "workflow.py").is_file()
    assert tuner.workflow == f"examples.{name}.workflow:workflow"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("**/*.py")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_imports_the_demos_agent_and_the_python_api_and_no_other_part_of_ratchet(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name for name in imported if name.split(".")[0] in NOT_FOR_EXAMPLES}
    allowed = (f"{THE_DEMOS_AGENT}.", "ratchet.demo.traffic.")
    assert {name for name in own if not f"{name}.".startswith(allowed)} <= {"ratchet"}  # the Python API


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


@pytest.mark.parametrize("name", FOLDERS)
def test_every_module_that_a_readme_runs_is_there(name: str) -> None:
    modules = re.findall(r"python -m\s+([\w.]+)", (EXAMPLES / name / "README.md").read_text("utf-8"))
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
