"""Plug-ins: an installed package of its own is listed and loaded; the optional features are loaded the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.trainer.errors import OptimizerMissing, PluginError
from ratchet.trainer.user_code.plugins import (
    EVALUATIONS,
    JUDGES,
    MONITORS,
    PROMPT_OPTIMIZERS,
    load_plugin,
    plugin_names,
)
from ratchet.tuner.prompts.optimizer import load_optimizer
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompt_fakes import WorldEvaluate, search
from tests.harness.tuner.scripted_reflection_model import ScriptedReflectionModel
from tests.tuner.test_prompt_optimizers import reflection

PACKAGE = Path(__file__).parents[1] / "harness" / "plugin_example"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example package."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "ratchet_plugin_example.py"):
        (source / name).write_bytes((PACKAGE / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    return site


def test_what_pip_installs_is_listed_beside_what_ratchet_registers(installed: Path) -> None:
    assert plugin_names(JUDGES) == ["brevity", "openjudge"]
    assert plugin_names(PROMPT_OPTIMIZERS) == ["best_of", "gepa", "mipro"]
    assert plugin_names(EVALUATIONS) == ["bfcl"]
    assert plugin_names(MONITORS) == ["tensorboard", "wandb"]


def test_a_plugin_optimizer_improves_a_prompt(installed: Path, reflection_server: ScriptedReflectionModel) -> None:
    evaluate = WorldEvaluate()
    load_optimizer("best_of").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    score, prompt = evaluate.best()
    assert prompt != prompt_world.SEED
    assert score > 0


def test_a_missing_plugin_is_refused_with_the_group_and_the_installed_names() -> None:
    with pytest.raises(
        OptimizerMissing, match=r"--method guess: .*ratchet\.prompt_optimizers \(installed: gepa, mipro"
    ):
        load_optimizer("guess")


def register(folder: Path, distribution: str, lines: str) -> None:
    """Write the metadata of an installed distribution."""
    info = folder / f"{distribution}-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(lines)


def test_a_plugin_that_cannot_be_imported_names_its_distribution_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    register(
        tmp_path, "broken", "[ratchet.judges]\nabsent = no_such_module:Judge\nextra = no_such_module:Judge [llm]\n"
        "leaves = leaves:Judge\n",
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = {
        "absent": r"ratchet\.judges \(no_such_module:Judge, from broken 2\.1\).*No module named.*missing module",
        "extra": r"pip install 'broken\[llm\]'",
        "leaves": r"SystemExit: 3; update broken",
    }
    for name, message in expected.items():
        with pytest.raises(PluginError, match=message):
            load_plugin(JUDGES, name)


def test_a_name_that_two_distributions_register_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "first", "[ratchet.judges]\nsame = json:loads\n")
    register(tmp_path, "second", "[ratchet.judges]\nsame = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"registered by first 2\.1 and second 2\.1: uninstall one"):
        load_plugin(JUDGES, "same")


def test_an_evaluation_that_cannot_be_imported_leaves_the_others_usable(tmp_path: Path) -> None:
    register(tmp_path, "broken", "[ratchet.evaluations]\nodd = no_such_module:odd\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}

    def ratchet(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    shown, failed = ratchet("eval", "--help"), ratchet("eval", "odd", "--limit", "3")
    assert shown.returncode == 0
    assert "bfcl" in shown.stdout
    assert failed.returncode == 1
    assert "ratchet.evaluations" in failed.stderr
    assert "broken 2.1" in failed.stderr
