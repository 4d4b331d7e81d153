"""Weight tuning of an agent in AgentScope's real package, whose environment has no torch: the learner runs in ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.store.store import open_store
from tests.harness.cli.project import ROOT, Project
from tests.harness.clients.program import HERE, client_python
from tests.harness.metadata import write_metadata
from tests.harness.ports import free_port
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.tiny import build_tiny_model

pytestmark = [pytest.mark.clients, pytest.mark.slow]

# The scripted model says numbers that grow, so some attempts at a task contain a 6.
ROWS = [{"question": f"What is {number} plus {6 - number}?", "answer": "6"} for number in range(7)]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project with a task set, and with a learner that runs elsewhere."""
    made, port = Project(tmp_path), free_port()
    model, url = build_tiny_model(tmp_path / "tiny", hidden=32, layers=1), f"http://127.0.0.1:{port}"
    del made.content["base_model"]  # it is that of the call
    engine = {"command": [sys.executable, "-m", "tests.harness.cli.scripted_engine"]}
    made.write(vllm=made.content["vllm"] | engine, learner={"threads": 1, "port": port, "url": url})
    folder = tmp_path / "my_dataset"
    folder.mkdir()
    for split, some in (("train", ROWS[:4]), ("test", ROWS[4:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    try:
        made.start("learner", "--base-model", str(model))
        eventually(lambda: _is_ready(url), 180)
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("environment", ["agentscope1", "agentscope2"])
def test_the_tutorials_code_trains_the_weights(project: Project, environment: str) -> None:
    found = run(environment, project)
    assert [one["round"] for one in found["curve"]] == [0, 1]
    assert list((project.state / "run").glob("*.pid")) == []
    store = open_store(str(project.state / "store.db"))
    try:
        (tuning,) = store.tunings.page()
        made = [one for one in store.rollouts.of_tuning(tuning.id) if one.purpose == "live"]
        rounds = store.rounds.page("policy")
    finally:
        store.close()
    assert (tuning.id, tuning.kind, tuning.state) == (found["run"], "weights", "done")
    assert [one.failure for one in made] == [None] * 16
    # The learner got the groups with the judge's scores; the scripted model's logprobs are not those of the base model.
    (trained,) = rounds
    assert "16 of the 16 rows of the round were rejected" in str(trained.reason)
    assert "policy@0" in found["report"]


def run(environment: str, project: Project) -> dict[str, Any]:
    """Return what the program printed; it runs in the project's folder."""
    metadata = project.folder / "metadata"
    metadata.mkdir()
    done = subprocess.run(
        [str(client_python(environment)), str(HERE / "programs" / "agentscope_tune.py"), str(project.folder / "tiny")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{write_metadata(metadata)}"}, cwd=project.folder,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
    return found


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=20).status_code == 200
    except httpx.HTTPError:
        return False
