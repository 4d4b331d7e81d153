"""Claims about training in several processes, with real ones that `accelerate launch` starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from store import Store, open_store
from tests.trainer.agents import agents_work
from tests.trainer.scripted_engine import ScriptedEngine
from tests.trainer.several_processes import learn
from trainer.daemon import Daemon
from trainer.learning.learner_settings import LearnerSettings

ROOT = Path(__file__).parents[2]
# What the process that meets an error says of it, and the other one too.
APART = {
    "follower_refuses": "process 1 met RowError: a row that only I refuse",
    "follower_breaks": "Strange: nobody knows it",
    "follower_has_no_memory": "process 1 met OutOfMemory: no memory for a round of 400 rows",
    "follower_has_no_model": "process 1 met ModelNotFound",
    "follower_is_killed": "",
    "leader_refuses": "process 0 met RowError: a row that only I refuse",
    "leader_breaks": "Strange: nobody knows it",
    "leader_cannot_save": "process 0 met CheckpointUnwritable",
    "leader_is_killed": "",
}


def launched(*program: str, log: Path | None = None) -> subprocess.Popen[str]:
    """Two processes of a module of this project, as `accelerate launch` starts them; what they say goes to `log`."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") if log else contextlib.nullcontext(subprocess.PIPE) as said:
        return subprocess.Popen(
            [*launch, "-m", *program],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )


def trainer_settings(model: Path, engine: ScriptedEngine, folder: Path, learner: dict[str, Any]) -> str:
    return json.dumps(
        {
            "store": str(folder / "together.db"), "model": "agent", "base_model": str(model), "vllm": [engine.url],
            "checkpoints": str(folder / "together" / "checkpoints"), "group_size": 3, "groups_per_round": 2,
            "judge": "tests.trainer.judges_by_number:scripted", "seal_after_idle_seconds": 1, "proof_tolerance": 1e6,
            "lease_seconds": 3, "learner": learner,
        }
    )  # fmt: skip


def wait_for(happened: Callable[[], bool], run: subprocess.Popen[str], seconds: float = 150) -> None:
    """Wait until it happened, the run ended or the time is up: what follows tells."""
    until = time.monotonic() + seconds
    while not happened() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.1)


def follower_of(run: subprocess.Popen[str]) -> psutil.Process | None:
    """The second process, once it is there."""
    for child in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.environ().get("RANK") == "1":
                return child
    return None


def distance(ours: Path, theirs: Path) -> float:
    """How far two checkpoints' adapters lie from each other, against their size."""
    one, other = (load_file(folder / "learner" / "lora.safetensors") for folder in (ours, theirs))
    gap = torch.cat([(one[name] - other[name]).flatten() for name in one])
    return float(gap.norm() / torch.cat([tensor.flatten() for tensor in one.values()]).norm())


@pytest.fixture(scope="module")
def together(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes did every case, at once."""
    folder = tmp_path_factory.mktemp("together")
    program = [sys.executable, "-m", "tests.trainer.several_processes", str(tiny_model), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*program, "learn", *APART, "all_refuses"], cwd=ROOT, env=environment, timeout=180, check=True)
    return folder


def test_two_processes_learn_what_one_does(together: Path, tiny_model: Path, tmp_path: Path) -> None:
    learn(str(tiny_model), tmp_path)
    expected = json.loads((tmp_path / "0.json").read_text())
    for rank in (0, 1):
        found = json.loads((together / f"{rank}.json").read_text())
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    assert distance(tmp_path / "0001", together / "0001") < 1e-4


@pytest.mark.parametrize("case", APART)
def test_an_error_that_one_of_two_processes_meets_ends_both_with_its_reason(case: str, together: Path) -> None:
    unlucky, other = ("0", "1") if case.startswith("leader") else ("1", "0")
    said = (together / f"{case}-{unlucky}").read_text()
    heard = (together / f"{case}-{other}").read_text()
    assert said.endswith(("ended with 1\n", "ended with 3\n")) or "killed" in case, said[-2000:]
    assert heard.endswith("ended with 1\n"), heard[-2000:]
    assert "ProcessLost" in heard
    assert APART[case] in said
    if other == "0":  # it had the notes
        assert APART[case] in heard, heard[-2000:]
    assert not (together / case / "0001").exists()


def test_an_error_that_all_processes_meet_is_the_leaders_to_handle(together: Path) -> None:
    for rank in (0, 1):
        said = (together / f"all_refuses-{rank}").read_text()
        assert said.endswith("ended with 0\n"), said[-2000:]
    assert (together / "all_refuses" / "0001").is_dir()


def test_the_trainer_in_two_processes_makes_the_version_that_one_makes_and_ends_as_one(
    store: Store, make_daemon: Callable[..., Daemon], engine: ScriptedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    learner = {"threads": 1, "learning_rate": 1e-3, "token_budget": 16}
    work = {"a": [0.0, 1.0, 0.5], "b": [1.0, 0.0, 0.2]}
    other = open_store(str(tmp_path / "together.db"))
    other.policies.register_base("agent", "base")
    for opened in (store, other):
        for task, scores in work.items():
            agents_work(opened, task, scores)
    make_daemon(group_size=3, learner=LearnerSettings(**learner)).turn(1000.0)  # type: ignore[arg-type]
    engine.scorer = lambda name, ids: -float(len(name)) - len(engine.loaded)
    run = launched("tests.trainer.one_of_several_trainers", trainer_settings(tiny_model, engine, tmp_path, learner))
    try:
        wait_for(lambda: other.policies.live()["agent"].version == 1, run)
        run.terminate()
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert other.policies.live()["agent"].version == 1, said[-3000:]
    assert "event=trainer_stopped" in said
    other.close()
    assert distance(tmp_path / "checkpoints" / "0001", tmp_path / "together" / "checkpoints" / "0001") < 1e-4


def test_a_process_that_dies_in_a_round_ends_all_with_a_reason_and_the_next_start_trains_the_round_once(
    store_file: Path, engine: ScriptedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    settings = trainer_settings(tiny_model, engine, tmp_path, {"threads": 1, "learning_rate": 1e-3, "token_budget": 16})
    shutil.copy(store_file, tmp_path / "together.db")
    store = open_store(str(tmp_path / "together.db"))
    store.policies.register_base("agent", "base")
    engine.scorer = lambda name, ids: -float(len(name)) - len(engine.loaded)
    log = tmp_path / "log"
    run = launched("tests.trainer.one_of_several_trainers", settings, log=log)
    try:
        wait_for(lambda: "event=trainer_ready" in log.read_text(), run)
        follower = follower_of(run)
        assert follower is not None, log.read_text()[-3000:]
        follower.suspend()  # it takes no part in the round, in which the leader waits for it
        for task, scores in {"a": [0.0, 1.0, 0.5], "b": [1.0, 0.0, 0.2]}.items():
            agents_work(store, task, scores)
        wait_for(lambda: bool(store.rounds.page("agent")), run)
        time.sleep(1)
        assert [held.to_version for held in store.rounds.page("agent")] == [None], log.read_text()[-3000:]
        follower.kill()
        run.wait(timeout=90)
    finally:
        run.kill()
    assert run.returncode != 0
    assert "error=ProcessLost" in log.read_text(), log.read_text()[-3000:]
    assert store.policies.live()["agent"].version == 0
    run = launched("tests.trainer.one_of_several_trainers", settings, log=log)
    try:
        wait_for(lambda: store.policies.live()["agent"].version == 1, run)
        run.terminate()
        run.wait(timeout=90)
    finally:
        run.kill()
    assert store.policies.live()["agent"].version == 1, log.read_text()[-3000:]
    (broken_off,) = [held for held in store.rounds.page("agent") if held.to_version is None]
    assert broken_off.reason is not None
    assert broken_off.reason.startswith("ProcessLost: a process that trains along has ended")
    committed = [held for held in store.rounds.page("agent") if held.to_version is not None]
    assert [held.metrics["trajectories"] for held in committed] == [6]
    store.close()
