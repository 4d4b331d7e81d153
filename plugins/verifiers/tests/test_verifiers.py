"""Environments of the package verifiers, in an environment of its own: it needs another version of OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.operation_records import Tuning
from ratchet.store.store import Store
from ratchet.trainer.errors import WorkflowError
from ratchet.trainer.tasks import Task, TaskSet
from ratchet.tuner.rollouts.runner import RolloutRunner
from ratchet.tuner.rollouts.workflow import load_workflow
from tests.conftest import store
from tests.harness.clients.program import client_python
from tests.harness.packages import ROOT
from tests.harness.proxy.running_proxy import Proxy
from tests.tuner.conftest import jobs_of, proxy, runner, scripted, start, tuning, vllm, vllm_url

__all__ = ["proxy", "runner", "scripted", "start", "store", "tuning", "vllm", "vllm_url"]  # fixtures
HERE = Path(__file__).parent
TASKSETS = HERE / "tasksets"
clients = pytest.mark.clients


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program, by default with verifiers, in the tasksets' folder."""

    def run(*words: str, python: Path | None = None, folder: Path = TASKSETS) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        command = [str(python or client_python("verifiers")), "-P", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=480, cwd=folder)

    return run


@pytest.fixture
def rollouts(program: Callable[..., Any], proxy: Proxy, store_file: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run tasks through the proxy; return the rollouts by the task's name."""

    def run(source: str, count: int = 100, **where: Path) -> dict[str, dict[str, Any]]:
        script = str(HERE / "verifiers_rollouts.py")
        done = program(script, str(store_file), proxy.url, source, str(count), **where)
        assert done.returncode == 0, done.stderr
        proxy.settled()
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return {one["row"].get("name", str(number)): one for number, one in enumerate(found)}

    return run


@clients
def test_an_episode_is_an_ordinary_trajectory_with_the_environments_reward(
    rollouts: Callable[..., dict[str, dict[str, Any]]], store: Store
) -> None:
    found = rollouts("verifiers:toy_sums")
    assert {name: one["reward"] for name, one in found.items() if one["failure"] is None} == {"right": 1, "wrong": 0.5}
    assert found["wrong"]["metrics"] == {"characters": 1, "number": 1, "right": 0}
    assert found["right"]["response"] == '"4"'
    assert found["right"]["row"]["answer"] == "4"
    (call,) = store.trajectories.read(found["right"]["id"]).calls
    assert len(call.choices[0].token_ids) == len(call.choices[0].logprobs) > 0


@clients
def test_an_error_of_model_harness_or_scoring_fails_the_rollout(
    rollouts: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    found = rollouts("verifiers:toy_sums")
    failures = {name: one["failure"] for name, one in found.items() if one["failure"] is not None}
    assert failures.keys() == {"refused", "unscored", "ended"}
    assert "ProviderError: " in failures["refused"]
    assert "500" in failures["refused"]
    assert "the grader is down" in failures["unscored"]
    assert "the program of the harness ended" in failures["ended"]
    assert all(found[name]["reward"] is None for name in failures)


@pytest.fixture
def openenv_url() -> Iterator[str]:
    """The URL of a running OpenEnv server."""
    command = [str(client_python("verifiers")), str(HERE / "openenv_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@clients
def test_an_openenv_server_is_played_turn_by_turn(
    rollouts: Callable[..., dict[str, dict[str, Any]]], openenv_url: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "two_sums.toml").write_text(
        f'[env]\ntaskset.id = "openenv"\ntaskset.base_url = "{openenv_url}"\n'
        'taskset.resets = [{number = 2}, {number = 3}]\nplayer.harness.id = "toy_sums"\n'
    )
    right, wrong = rollouts(f"verifiers:{tmp_path / 'two_sums.toml'}").values()
    assert [(one["reward"], one["failure"]) for one in (right, wrong)] == [(2.0, None), (0.0, None)]
    transcript = store.trajectories.read(right["id"])
    assert [message["role"] for message in transcript.messages] == ["user", "assistant"] * 2
    assert len(transcript.calls) == 2


@clients
def test_the_example_is_evaluated(rollouts: Callable[..., dict[str, dict[str, Any]]], store: Store) -> None:
    found = rollouts("verifiers:math_calculator", 2, folder=ROOT / "examples" / "verifiers")
    assert [one["failure"] for one in found.values()] == [None, None]
    assert all(one["reward"] in (0.0, 1.0) and "tool_calls" in one["metrics"] for one in found.values())
    assert all(store.trajectories.read(one["id"]).tools for one in found.values())


@clients
def test_an_imported_task_runs_as_a_program_in_the_environment_that_has_verifiers(
    program: Callable[..., Any],
    runner: Callable[..., RolloutRunner],
    tuning: Tuning,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(TASKSETS / "toy_sums.py", tmp_path)
    (tmp_path / "few.toml").write_text(
        'model = "not used"\n[env.taskset]\nid = "toy_sums"\nendless = true\n'
        '[select]\ninclude.idx = ":7"\n[sampling]\ntemperature = 0.5\n'
    )
    done = program("-m", "ratchet", "tasks", "import", "verifiers:few.toml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["name"], made["splits"], made["duplicates"]) == ("few", {"train": 5}, {"train": 2})
    (file,) = (tmp_path / ".ratchet").rglob("train.jsonl")
    right, wrong, *_ = TaskSet.open(file).rows("train")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    run = runner(f"{client_python('verifiers')} -m ratchet.environments.verifiers", timeout_seconds=400)
    changed = Task("changed", {"verifiers": right.row["verifiers"] | {"key": "0" * 16}}, "train", 1)
    found = asyncio.run(run.run(jobs_of([right, wrong, changed]), tuning.id))
    assert [one.reward for one in found] == [1.0, 0.5, None]
    assert "no task 0000000000000000 any more" in str(found[2].failure)


@clients
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("taskset.id = 'nowhere'", "verifiers itself has harbor, nemo_gym, openenv, textarena"),
        (
            "taskset.id = 'toy_sums'\ntaskset.endless = true",
            "is infinite: use a configuration file with `select.limit`",
        ),
        ("taskset.id = 'toy_sums'\nnonsense = 3", "nonsense"),
        ("taskset.id = 'toy_sums'\nagent.harness.id = 'nowhere'", "The built-in harnesses are: bash"),
    ],
)
def test_what_cannot_be_imported_is_reported_with_the_remedy(
    program: Callable[..., Any], tmp_path: Path, config: str, message: str
) -> None:
    shutil.copy(TASKSETS / "toy_sums.py", tmp_path)
    (tmp_path / "wrong.toml").write_text(f"[env]\n{config}\n")
    done = program("-m", "ratchet", "tasks", "import", "verifiers:wrong.toml", folder=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_package_the_errors_name_the_plugin(program: Callable[..., Any], tmp_path: Path) -> None:
    done = program("-m", "ratchet", "tasks", "preview", "verifiers:gsm8k", python=Path(sys.executable), folder=tmp_path)
    assert done.returncode == 1
    assert "pip install ./plugins/verifiers" in done.stderr
    with pytest.raises(WorkflowError, match=r"No module named 'verifiers.* in .*pip install \./plugins/verifiers$"):
        load_workflow("ratchet.environments.verifiers:workflow")
