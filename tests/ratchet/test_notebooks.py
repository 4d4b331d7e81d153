"""The notebooks of examples/notebooks, run from the first cell to the last, with scripted models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli.project import Project
from tests.harness.trainer.scripted_judge_model import ScriptedJudgeModel, says
from tests.harness.trainer.tiny import build_tiny_model
from tests.harness.tuner.model_project import model_project

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def run(name: str, folder: Path, **environ: str) -> str:
    """Run a notebook in a folder, as a kernel does; return what it printed."""
    command = [sys.executable, "-m", "tests.harness.examples.notebook", str(NOTEBOOKS / f"{name}.ipynb")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("file", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda file: str(file.stem))
def test_notebooks_are_kept_without_outputs(file: Path) -> None:
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert {(len(cell["outputs"]), cell["execution_count"]) for cell in cells} == {(0, None)}


@pytest.mark.slow
def test_the_quick_start_compares_models(project: Project) -> None:
    with model_project(project) as circle:
        url = f"{circle.proxy_url}/v1"
        printed = run("quick_start", project.folder, OPENAI_BASE_URL=url, MODELS="right-95,right-20")
    assert "chosen: right-95" in printed
    assert "right-20 What is" in printed, "attempts that were wrong are shown"


@pytest.mark.slow
def test_ruler_scores_what_the_notebook_gathers(project: Project) -> None:
    model = ScriptedJudgeModel()

    def rank(body: dict[str, Any]) -> tuple[int, Any]:
        content = body["messages"][-1]["content"]
        labels = [one["trajectory_id"] for one in json.loads(content[content.index("{") :])["attempts"]]
        scores = [{"trajectory_id": one, "explanation": "it is short", "score": 0.25} for one in labels]
        return says({"scores": scores})

    model.answers = [rank] * 2
    with model_project(project), model.running():
        printed = run("own_judge_and_ruler", project.folder, JUDGE_URL=f"{model.url}/v1")
    assert printed.count("0.25 it is short") == 8
    assert "'Rome, Paris, Oslo'            0.0" in printed, "the rule refuses a list of candidates"


@pytest.mark.slow
def test_weights_are_tuned_in_services_that_the_notebook_starts_and_ends(project: Project) -> None:
    tiny = build_tiny_model(project.folder / "tiny", hidden=32, layers=1)
    engine = {"command": [sys.executable, "-m", "tests.harness.cli.scripted_engine"]}
    project.write(base_model=str(tiny), vllm=project.content["vllm"] | engine, learner={"threads": 1})
    try:
        printed = run("tune_and_compare", project.folder, ROUNDS="1", ATTEMPTS="2")
        assert list((project.state / "run").glob("*.pid")) == []
    finally:
        project.stop()
    assert "after 0 rounds" in printed
    assert "after 1 rounds" in printed
