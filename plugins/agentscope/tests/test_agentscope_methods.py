"""Model selection and prompt tuning of agents in AgentScope's real package, by the arguments of its tuner."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli.project import ROOT, Project
from tests.harness.clients.program import client_python
from tests.harness.tuner.model_project import model_project
from tests.harness.tuner.prompt_project import prompt_project
from tests.harness.tuner.prompt_world import WORDS

pytestmark = pytest.mark.clients
HERE = Path(__file__).parent


def run(environment: str, project: Project, *words: str) -> dict[str, Any]:
    """Return what the program printed; it runs in the project's folder."""
    done = subprocess.run(
        [str(client_python(environment)), str(HERE / "programs" / "agentscope_methods.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=project.folder,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
    return found


@pytest.mark.parametrize("environment", ["agentscope1", "agentscope2"])
def test_the_better_model_is_selected_by_its_name(project: Project, environment: str) -> None:
    with model_project(project) as made:
        found = run(environment, project, "select")
        (tuning,) = made.store.tunings.page()
    assert found["best"] == 1
    assert found["metrics"]["reward_avg"] > 0.8
    assert (tuning.kind, tuning.state) == ("select-model", "done")
    assert {one["model"] for one in made.models.requests} == {"right-20", "right-95"}


@pytest.mark.parametrize("environment", ["agentscope1", "agentscope2"])
def test_a_better_prompt_is_found(project: Project, environment: str) -> None:
    with prompt_project(project) as made:
        found = run(environment, project, "prompt", made.reflection.base_url)
    assert all(f"a {thing} is a {word}" in found["prompt"] for thing, word in WORDS.items())
    assert found["metrics"]["difference"] == 1.0
    assert any("You answer with one word." in prompt for prompt in made.vllm.prompts)
