"""The real learner as a process of its own, with a tiny model: equal to one in process, killed at any moment."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import LearnerUnreachable
from ratchet.trainer.learner_client import AgentLearner
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.ports import free_port
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.learner_process import HERE, LearnerProcess
from tests.harness.trainer.tiny import build_row, build_rows
from tests.harness.trainer.two_machines import Machine, two_machines

pytestmark = pytest.mark.slow

SETTINGS = LearnerSettings(learning_rate=1e-2, seed=3)
START_SECONDS = 240.0  # imports of torch beside other tests
GROUP_ENDS_SECONDS = 10.0  # after one of its processes


Start = Callable[..., LearnerProcess]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start learners; none is left at the end."""
    made: list[LearnerProcess] = []

    def make(name: str = "learner", machine: Machine = HERE, **learner: Any) -> LearnerProcess:
        made.append(LearnerProcess(tmp_path / name, tiny_model, machine, **learner))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()
        with suppress(psutil.NoSuchProcess):
            for process in one.pids():
                process.kill()
        one.process.wait(60)


def remote(learner: LearnerProcess, agent: str = "mail", source: Path | None = None) -> AgentLearner:
    return AgentLearner(learner.connection, agent, SETTINGS, source)


def checkpoints(learner: LearnerProcess, name: str) -> Path:
    return learner.checkpoints / "mail" / "checkpoints" / name


def test_a_learner_of_its_own_process_is_bitwise_one_in_process(start: Start, tiny_model: Path) -> None:
    served = start()
    own = Learner(str(tiny_model), replace(SETTINGS, threads=1))
    eventually(served.is_ready, START_SECONDS)
    mail, other = remote(served), remote(served, "support")
    expected = own.train_round(build_rows(6))
    found = mail.train_round(build_rows(6))
    assert replace(found, seconds=0.0) == replace(expected, seconds=0.0)
    scored = mail.score([build_row(9)])
    assert scored == own.score([build_row(9)])
    other.train_round(build_rows(4, seed=5))
    assert mail.score([build_row(9)]) == scored  # bit by bit, beside another agent's round
    assert other.score([build_row(9)]) != scored
    mail.save(checkpoints(served, "0001"))
    mail.train_round(build_rows(6, seed=2))
    mail.load(checkpoints(served, "0001"), SETTINGS)
    assert mail.score([build_row(9)]) == scored
    assert served.end() == 0


def test_a_kill_in_any_verb_is_an_outage_and_the_next_learner_goes_on_from_the_commit(start: Start) -> None:
    learner = start()
    eventually(learner.is_ready, START_SECONDS)
    mail = remote(learner)
    mail.train_round(build_rows(4))
    commit = checkpoints(learner, "0001")
    mail.save(commit)
    expected = mail.score([build_row(9)])
    for verb in ("train", "score", "save"):
        outage = killed_in(verb, mail, learner)
        assert isinstance(outage, LearnerUnreachable)
        learner = start(port=learner.port)
        mail._connection = learner.connection
        eventually(learner.is_ready, START_SECONDS)
        if verb == "train":
            with pytest.raises(LearnerUnreachable, match="newest commit must be loaded"):
                mail.save(checkpoints(learner, "9999"))
            assert not checkpoints(learner, "9999").exists()
        mail.load(commit, SETTINGS)
        assert mail.score([build_row(9)]) == expected
        assert mail.step == 1
    found = [folder for folder in commit.parent.iterdir() if folder.name.isdigit()]
    assert all(checkpoint.complete(folder) for folder in found)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_that_torchrun_started_ends_with_one_of_its_processes_and_goes_on(start: Start, victim: int) -> None:
    group: dict[str, Any] = {"num_processes": 2, "sharding": "fsdp2"}
    learner = start("group", **group)
    eventually(learner.is_ready, START_SECONDS)
    assert (learner.connection.status().processes, learner.connection.status().sharding) == (2, "fsdp2")
    mail = remote(learner)
    mail.train_round(build_rows(4))
    commit = checkpoints(learner, "0001")
    mail.save(commit)
    expected = mail.score([build_row(9)])
    processes = learner.pids()
    work = started_work("train", mail, learner)
    learner.member(victim).kill()
    killed_at = time.monotonic()
    assert learner.process.wait(GROUP_ENDS_SECONDS) != 0  # torchrun's exit code
    psutil.wait_procs(processes, timeout=GROUP_ENDS_SECONDS - (time.monotonic() - killed_at))
    assert not [process for process in processes if is_alive(process)], learner.log.read_text()[-3000:]
    work.join(60)
    assert work.error is not None
    learner = start("group", port=learner.port, **group)
    mail._connection = learner.connection
    eventually(learner.is_ready, START_SECONDS)
    mail.load(commit, SETTINGS)
    assert (mail.score([build_row(9)]), mail.step) == (expected, 1)


def killed_in(verb: str, mail: AgentLearner, learner: LearnerProcess) -> Exception | None:
    """Kill the learner while it works on a verb; return the error of its client."""
    thread = started_work(verb, mail, learner)
    killed_at = time.monotonic()
    learner.end(signal.SIGKILL)
    thread.join(60)
    assert time.monotonic() - killed_at < 30
    return thread.error


class Work(threading.Thread):
    """A client's operation in a thread, and the outage that ends it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self.error: LearnerUnreachable | None = None

    def run(self) -> None:
        try:
            self._work()
        except LearnerUnreachable as outage:
            self.error = outage


def started_work(verb: str, mail: AgentLearner, learner: LearnerProcess) -> Work:
    """Return the work on a verb, which the learner runs."""
    work: dict[str, Callable[[], object]] = {
        "train": lambda: mail.train_round(build_rows(400, seed=1)),
        "score": lambda: mail.score([build_row(seed) for seed in range(4000)]),
        "save": lambda: save_often(mail, learner),
    }
    thread = Work(work[verb])
    thread.start()
    eventually(lambda: learner.connection.status().running == f"mail {verb}", 60)
    return thread


def test_two_machines_learn_what_one_process_does_and_end_together(start: Start) -> None:
    alone = start("alone")
    with two_machines() as (first, second):
        group = {"machines": 2, "leader": first.address, "host": first.address, "leader_port": free_port()}
        leader = start("group", first, machine_rank=0, **group)
        follower = start("group", second, machine_rank=1, **group)
        eventually(alone.is_ready, START_SECONDS)
        expected = remote(alone).train_round(build_rows(6))
        eventually(leader.is_ready, START_SECONDS)
        learner = remote(leader)
        report = learner.train_round(build_rows(6))
        assert report.loss == pytest.approx(expected.loss, abs=1e-6)
        assert report.weight_change == pytest.approx(expected.weight_change, rel=1e-4)
        assert learner.score([build_row(9)])
        assert leader.connection.status().machines == 2
        processes = [*leader.pids(), *follower.pids()]
        for process in follower.pids():
            process.kill()
        with pytest.raises(LearnerUnreachable):
            learner.score([build_row(9)])  # an idle leader notices with its next operation
        assert leader.process.wait(60) != 0
        eventually(lambda: not [one for one in processes if is_alive(one)], 60)
        assert "WorkerProcessLost" in leader.log.read_text()


def save_often(mail: AgentLearner, learner: LearnerProcess) -> None:
    for number in range(2, 2000):
        mail.save(checkpoints(learner, f"{number:04d}"))


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
