"""Claims about training in several processes, with real ones that `accelerate launch` starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ratchet.store.store import Store, open_store
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.several_processes import learn
from tests.harness.trainer.stepped_controller import SteppedController

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# What the process that meets an error says of it, and the other one too.
APART = {
    "follower_refuses": "process 1 met RowError: a row that only I refuse",
    "follower_breaks": "Strange: nobody knows it",
    "follower_has_no_memory": "process 1 met OutOfMemory: out of memory in a round of 400 rows",
    "follower_has_no_model": "process 1 met ModelError",
    "follower_is_killed": "",
    "follower_is_killed_in_score": "",
    "follower_is_killed_in_save": "",
    "leader_refuses": "process 0 met RowError: a row that only I refuse",
    "leader_breaks": "Strange: nobody knows it",
    "leader_is_killed": "",
    "leader_is_killed_in_save": "",
}
LEARNER: dict[str, Any] = {"threads": 1, "learning_rate": 1e-3, "token_budget": 16}
WORK = {"a": [0.0, 1.0, 0.5], "b": [1.0, 0.0, 0.2]}


def launched(*program: str, log: Path | None = None) -> subprocess.Popen[str]:
    """Two processes of a module of this project, as `accelerate launch` starts them; what they say goes to `log`."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") if log else contextlib.nullcontext(subprocess.PIPE) as output:
        return subprocess.Popen(
            [*launch, "-m", *program],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def trainer_settings(model: Path, engine: ScriptedEngine, folder: Path, learner: dict[str, Any]) -> str:
    return json.dumps(
        {
            "store": str(folder / "together.db"), "model": "agent", "base_model": str(model), "vllm": [engine.url],
            "checkpoints": str(folder / "together" / "checkpoints"), "num_generations": 3, "groups_per_round": 2,
            "judge": "tests.harness.trainer.judge_samples:by_name", "seal_after_idle_seconds": 1,
            "lease_seconds": 3, "learner": learner, "release": {"policy": "immediate"},
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
    program = [sys.executable, "-m", "tests.harness.trainer.several_processes", str(tiny_model), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*program, "learn", *APART, "all_refuses", "all_cannot_save"],
        cwd=ROOT,
        env=environment,
        timeout=180,
        check=True,
    )
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


def test_two_processes_measure_one_movement_and_step_by_one_rate(together: Path) -> None:
    one, other = (json.loads((together / f"{rank}.json").read_text()) for rank in (0, 1))
    for name in ("learning_rate", "approx_kl", "logprob_change_abs_mean", "logprob_change_positive_mean"):
        assert one[name] == other[name], name
    first, second = one["learning_rate"]
    assert first != second  # it was steered


@pytest.mark.parametrize("case", APART)
def test_an_error_that_one_of_two_processes_meets_ends_both_with_its_reason(case: str, together: Path) -> None:
    unlucky, other = ("0", "1") if case.startswith("leader") else ("1", "0")
    output = (together / f"{case}-{unlucky}").read_text()
    other_output = (together / f"{case}-{other}").read_text()
    assert output.endswith(("ended with 1\n", "ended with 3\n")) or "killed" in case, output[-2000:]
    assert other_output.endswith("ended with 1\n"), other_output[-2000:]
    assert "WorkerProcessLost" in other_output
    assert APART[case] in output
    if other == "0":  # it had the notes
        assert APART[case] in other_output, other_output[-2000:]
    assert not (together / case / "0001").exists()


def test_an_error_that_all_processes_meet_is_the_leaders_to_handle(together: Path) -> None:
    for rank in (0, 1):
        output = (together / f"all_refuses-{rank}").read_text()
        assert output.endswith("ended with 0\n"), output[-2000:]
    assert (together / "all_refuses" / "0001").is_dir()


def test_a_checkpoint_that_cannot_be_written_ends_no_process(together: Path) -> None:
    for rank in (0, 1):
        output = (together / f"all_cannot_save-{rank}").read_text()
        assert output.endswith("ended with 0\n"), output[-2000:]
    assert "CheckpointError" in (together / "all_cannot_save-1").read_text()
    assert (together / "all_cannot_save" / "0001").is_dir()


def test_two_processes_begin_again_together_where_the_leader_says(together: Path) -> None:
    assert distance(together / "all_refuses" / "0001", together / "all_refuses" / "0002") == 0.0


@dataclass(frozen=True, slots=True)
class Story:
    """What two trainers did of which one died in a round, and the next two; each ended with a code and a log."""

    store: Store
    folder: Path
    rounds: list[int | None]  # after the death, by the version that they led to
    live_after_the_death: int
    first: tuple[int, str]
    second: tuple[int, str]


@pytest.fixture(scope="module")
def story(tiny_model: Path, migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One process of two dies in a round; two new ones continue and are stopped after the first version."""
    folder = tmp_path_factory.mktemp("story")
    shutil.copy(migrated, folder / "together.db")
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(str(folder / "together.db")))
        engine = ScriptedEngine(lambda name, ids: 0.0)
        learner = Learner(str(tiny_model), LearnerSettings(**LEARNER))
        engine.scorer = Faithful(engine, lambda: learner)
        stack.enter_context(contextlib.closing(engine))
        store.policies.register_base("agent", "base")
        settings = trainer_settings(tiny_model, engine, folder, LEARNER)
        first = _dies_in_a_round(store, settings, folder / "first.log")
        rounds = [held.to_version for held in store.rounds.page("agent")]
        live = store.policies.live()["agent"].version
        second = _goes_on(store, settings, folder / "second.log")
        yield Story(store, folder, rounds, live, first, second)


def _dies_in_a_round(store: Store, settings: str, log: Path) -> tuple[int, str]:
    run = launched("tests.harness.trainer.in_process_learner", settings, log=log)
    try:
        wait_for(lambda: "event=learner_ready" in log.read_text(), run)
        follower = follower_of(run)
        assert follower is not None, log.read_text()[-3000:]
        follower.suspend()  # it takes no part in the round, in which the leader waits for it
        for task, scores in WORK.items():
            agents_work(store, task, scores)
        wait_for(lambda: bool(store.rounds.page("agent")), run)
        follower.kill()
        return run.wait(timeout=120), log.read_text()
    finally:
        run.kill()


def _goes_on(store: Store, settings: str, log: Path) -> tuple[int, str]:
    run = launched("tests.harness.trainer.in_process_learner", settings, log=log)
    try:
        wait_for(lambda: store.policies.live()["agent"].version == 1, run)
        run.terminate()
        return run.wait(timeout=120), log.read_text()
    finally:
        run.kill()


def test_a_process_that_dies_in_a_round_ends_all_with_a_reason(story: Story) -> None:
    code, output = story.first
    assert code != 0
    reasons = "error=WorkerProcessLost", "Signal 9 (SIGKILL) received"  # of the leader, or of a launcher that is faster
    assert any(reason in output for reason in reasons), output[-3000:]
    assert (story.rounds, story.live_after_the_death) == ([None], 0), output[-3000:]


def test_the_next_start_trains_the_round_once_and_ends_as_one(story: Story) -> None:
    _, output = story.second
    assert story.store.policies.live()["agent"].version == 1, output[-3000:]
    (broken_off,) = [held for held in story.store.rounds.page("agent") if held.to_version is None]
    assert broken_off.reason is not None
    assert broken_off.reason.startswith("WorkerProcessLost: ")
    committed = [held for held in story.store.rounds.page("agent") if held.to_version is not None]
    assert [held.metrics["trajectories"] for held in committed] == [6]
    assert "event=trainer_stopped" in output


def test_the_trainer_in_two_processes_makes_the_version_that_one_makes(
    story: Story, store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    for task, scores in WORK.items():
        agents_work(store, task, scores)
    make_controller(num_generations=3, learner=LearnerSettings(**LEARNER)).step(1000.0)
    alone, together = (rounds.newest_committed("agent") for rounds in (store.rounds, story.store.rounds))
    assert alone is not None
    assert together is not None
    for name in ("rows", "rows_rejected", "tokens_trained", "learning_rate", "rate_scale"):
        assert alone.metrics[name] == together.metrics[name], name
    ours, theirs = (folder / "checkpoints" / "0001" for folder in (tmp_path, story.folder / "together"))
    assert distance(ours, theirs) < 1e-4
