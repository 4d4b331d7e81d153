"""Weight tuning by the arguments of AgentScope's tuner; with its real package, whose environment has no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import ratchet
from ratchet.agentscope import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from ratchet.store.store import open_store
from tests.harness.cli.project import ROOT, Project
from tests.harness.clients.program import client_python
from tests.harness.ports import free_port
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.tiny import build_tiny_model
from tests.harness.tuner.scripted_versions import agent
from tests.ratchet.test_python_tune import tuned

__all__ = ["tuned"]  # a fixture

HERE = Path(__file__).parent

# The scripted model says numbers that grow, so some attempts at a task contain a 6.
ROWS = [{"question": f"What is {number} plus {6 - number}?", "answer": "6"} for number in range(7)]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Project]:
    """A project with a task set, and with a learner that runs elsewhere."""
    made, port = Project(tmp_path), free_port()
    model, url = build_tiny_model(tmp_path / "tiny", hidden=32, layers=1), f"http://127.0.0.1:{port}"
    del made.content["base_model"]  # it is that of the call
    engine = {"command": [sys.executable, "-m", "tests.harness.proxy.scripted_vllm"]}
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


@pytest.mark.clients
@pytest.mark.parametrize("environment", ["agentscope1", "agentscope2"])
def test_the_tutorials_code_trains_the_weights(elsewhere: Project, environment: str) -> None:
    found = run(environment, elsewhere)
    assert [one["round"] for one in found["curve"]] == [0, 1]
    assert list((elsewhere.state / "run").glob("*.pid")) == []
    store = open_store(str(elsewhere.state / "store.db"))
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
    done = subprocess.run(
        [str(client_python(environment)), str(HERE / "programs" / "agentscope_tune.py"), str(project.folder / "tiny")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=project.folder,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
    return found


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


async def answer(task: Mapping[str, Any], base_url: str, model: str) -> WorkflowOutput:
    return WorkflowOutput(response=await agent(task, base_url, model))


def test_code_for_agentscopes_tuner_trains_with_its_own_configurations(tuned: Project) -> None:
    model, engine = tuned.content.pop("base_model"), tuned.content["vllm"]
    tuned.write()  # the model is that of the call

    async def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(reward=float(len(response.get_text_content()) % 2), metrics={"tasks": float(len(task))})

    run = tune(
        workflow_func=answer,
        judge_func=judge,
        train_dataset=DatasetConfig(path="tasks", total_steps=1),
        eval_dataset=DatasetConfig(path="tasks", split="test"),
        model=TunerModelConfig(model_path=model, max_model_len=256),
        algorithm=AlgorithmConfig(algorithm_type="rloo", group_size=2, batch_size=2, eval_interval_steps=1),
    )
    assert list((tuned.state / "run").glob("*.pid")) == []
    assert [one["round"] for one in run.curve()] == [0, 1]
    used = yaml.safe_load((tuned.state / "run" / "settings.json").read_text())
    assert used["base_model"] == model
    assert used["vllm"]["max_model_len"] == 256
    assert used["vllm"]["command"] == engine["command"]  # of ratchet.yaml: the call says nothing about it
    assert {key: used["trainer"][key] for key in ("advantage_estimator", "num_generations", "groups_per_round")} == {
        "advantage_estimator": "rloo", "num_generations": 2, "groups_per_round": 2,
    }  # fmt: skip


def test_arguments_without_a_counterpart_are_refused_before_anything_runs(tuned: Project) -> None:
    given: Any = {"workflow_func": answer, "train_dataset": DatasetConfig(path="tasks")}
    with pytest.raises(ratchet.RatchetError, match="auxiliary_models names 'big', which is not in model_list"):
        tune(**given, auxiliary_models={"big": TunerModelConfig(model_path="big", max_model_len=256)})
    with pytest.raises(ratchet.RatchetError, match="config_path names settings of Trinity"):
        tune(**given, config_path="trinity.yaml")
    assert not tuned.state.exists()
