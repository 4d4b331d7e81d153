"""Notebooks in a Jupyter kernel: those of examples/notebooks, with scripted models, and cells that are interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.chat_models import ScriptedModel, says
from tests.harness.cli.project import ROOT, Project
from tests.harness.clients.program import HERE, client_python
from tests.harness.trainer.tiny import build_tiny_model
from tests.harness.tuner.model_project import model_project

pytestmark = pytest.mark.clients

NOTEBOOKS = ROOT / "examples" / "notebooks"
CELLS = (
    """
import asyncio, itertools, openai, os, ratchet, threading

calls = itertools.count(1)

async def workflow(task, base_url, api_key, model):
    await asyncio.sleep(SECONDS)
    if SECONDS and next(calls) % 10 == 0:
        print("ten more")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model=model, messages=messages)
    return answer.choices[0].message.content

def judge(task, response):
    return float(response == task["answer"])

SECONDS = 0.2
""",
    """
run = ratchet.select_model(workflow, judge, "sums", models=["right-95", "right-20"], attempts=8, concurrency=2)
print(run.id)
run.wait()
""",
    'print(run.status.state, [one.name for one in threading.enumerate() if "ratchet" in one.name])',
    """
found = await ratchet.evaluate_async(workflow, judge, "sums", models=["right-95"], attempts=8, concurrency=2)
""",
    'print([one.name for one in threading.enumerate() if "ratchet" in one.name])',
    """
SECONDS = 0
run = ratchet.select_model(workflow, judge, "sums", concurrency=20, resume=run.id).wait()
print(run.status.state, run.status.rollouts)
print(run.report())
""",
    'ratchet.evaluate(workflow, judge, "sums", models="right-95", base_url=os.environ["URL"], concurrency=5)',
)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    yield project
    project.stop()


def run(file: Path, folder: Path, *interrupted_at: str, **environ: str) -> list[dict[str, Any]]:
    """Return what each cell put out; the kernel runs in a folder."""
    python, program = client_python("jupyter"), str(HERE / "programs" / "notebook.py")
    path = [str(python.parent), os.environ["PATH"]]
    variables = {
        **os.environ, "PATH": os.pathsep.join(path), "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]), **environ,
    }  # fmt: skip
    done = subprocess.run(
        [str(python), program, str(file), *interrupted_at], cwd=folder, env=variables, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    cells: list[dict[str, Any]] = json.loads(done.stdout.partition("RESULT ")[2])
    return cells


def printed(name: str, folder: Path, **environ: str) -> str:
    """Run a notebook of the examples to its end; return what it printed."""
    cells = run(NOTEBOOKS / f"{name}.ipynb", folder, **environ)
    assert [cell["error"] for cell in cells if cell["error"]] == []
    return "".join(cell["stdout"] for cell in cells)


@pytest.mark.parametrize("file", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda file: str(file.stem))
def test_notebooks_are_kept_without_outputs(file: Path) -> None:
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert {(len(cell["outputs"]), cell["execution_count"]) for cell in cells} == {(0, None)}


def test_the_quick_start_compares_models(project: Project) -> None:
    with model_project(project) as circle:
        url = f"{circle.proxy_url}/v1"
        text = printed("quick_start", project.folder, OPENAI_BASE_URL=url, MODELS="right-95,right-20")
    assert "chosen: right-95" in text
    assert "right-20 What is" in text, "attempts that were wrong are shown"


def test_ruler_scores_what_the_notebook_gathers(project: Project) -> None:
    model = ScriptedModel()

    def rank(body: dict[str, Any]) -> tuple[int, Any]:
        content = body["messages"][-1]["content"]
        labels = [one["trajectory_id"] for one in json.loads(content[content.index("{") :])["attempts"]]
        scores = [{"trajectory_id": one, "explanation": "it is short", "score": 0.25} for one in labels]
        return says({"scores": scores})

    model.answers = [rank] * 2
    with model_project(project), model:
        text = printed("own_judge_and_ruler", project.folder, JUDGE_URL=f"{model.url}/v1")
    assert text.count("0.25 it is short") == 8
    assert "'Rome, Paris, Oslo'            0.0" in text, "the rule refuses a list of candidates"


def test_weights_are_tuned_in_services_that_the_notebook_starts_and_ends(project: Project) -> None:
    tiny = build_tiny_model(project.folder / "tiny", hidden=32, layers=1)
    engine = {"command": [sys.executable, "-m", "tests.harness.proxy.scripted_vllm"]}
    project.write(base_model=str(tiny), vllm=project.content["vllm"] | engine, learner={"threads": 1})
    text = printed("tune_and_compare", project.folder, ROUNDS="1", ATTEMPTS="2")
    assert list((project.state / "run").glob("*.pid")) == []
    assert "after 0 rounds" in text
    assert "after 1 rounds" in text


def test_interrupted_cells_leave_nothing_running_and_their_run_is_resumed(project: Project) -> None:
    notebook = project.folder / "interrupted.ipynb"
    cells = [{"cell_type": "code", "source": source} for source in CELLS]
    notebook.write_text(json.dumps({"cells": cells}))
    with model_project(project) as circle:
        _, waited, after_wait, awaited, after_await, resumed, shown = run(
            notebook, project.folder, "ten more", URL=f"{circle.models.url}/v1"
        )
        compared, evaluated = sorted(circle.store.tunings.page(), key=lambda one: one.kind)[::-1][:2]
    bars = [text for text in waited["shown"] if "rollouts" in text]
    assert len(bars) > 2, "a bar is updated in place"
    assert bars[0].startswith("░" * 30)
    assert waited["stdout"] == f"{compared.id}\nten more\n", "what the caller and its functions print is kept"
    assert waited["error"].startswith("KeyboardInterrupt")
    assert after_wait["stdout"] == "stopped []\n"
    assert awaited["error"].startswith(("CancelledError", "KeyboardInterrupt"))
    assert f"ratchet.evaluate(resume='{evaluated.id}', ...)" in awaited["stderr"]
    assert after_await["stdout"] == "[]\n"
    assert resumed["stdout"].startswith("done 320\n")
    assert "chosen: right-95" in resumed["stdout"]
    assert "rollouts 20 of 20" in str(shown["shown"])
    assert "│ right-95  │" in shown["shown"][-1], "the table is what the cell ends with"
    assert shown["error"] is None
