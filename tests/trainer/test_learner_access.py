"""How a trainer finds or starts its learner: restarts, the end of both, and one learner per base model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.store.store import Store
from ratchet.supervisor import process_guard
from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.learner_client import UNREACHABLE, LearnerAccess, LearnerCommand
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.ports import free_port
from tests.harness.proxy.servers import ROOT, eventually
from tests.harness.trainer.scripted_learner import TOKEN, ScriptedHost, scripted_service

ROW = TokenRow("a", (1, 2), (0, 1), (0.0, -0.5), 1.0)
Reach = Callable[..., LearnerAccess]


def command(folder: Path, port: int | None = None, program: str | None = None) -> LearnerCommand:
    port = port or free_port()
    run = ("-c", program) if program else ("-m", "tests.harness.trainer.scripted_processes", "learner", str(port))
    guard = (sys.executable, "-I", "-S", process_guard.__file__, "5")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return LearnerCommand((*guard, sys.executable, *run), environment, f"http://127.0.0.1:{port}", folder / "log", 2)


@pytest.fixture
def reach(store: Store, tmp_path: Path) -> Iterator[Reach]:
    """Return accesses of trainers with the settings that are given; all are closed at the end."""
    with ExitStack() as stack:

        def make(url: str | None = None, start: LearnerCommand | None = None, **values: Any) -> LearnerAccess:
            settings = TrainerSettings(
                store="unused", model="agent", base_model="base", vllm=("http://127.0.0.1:1",),
                lease_seconds=values.pop("lease_seconds", 2), checkpoints=tmp_path / "checkpoints",
                judge="tests.harness.trainer.judge_samples:scripted",
                learner_process=LearnerProcessSettings(url=url),
            )  # fmt: skip
            environ = {TOKEN_VARIABLE: values.pop("token", TOKEN)}
            return stack.enter_context(LearnerAccess(settings, store, start, environ=environ, **values))

        yield make


def settings_of(access: LearnerAccess, folder: Path) -> TrainerSettings:
    return TrainerSettings(
        store="unused", model="agent", base_model="base", vllm=("http://127.0.0.1:1",), checkpoints=folder,
        judge="tests.harness.trainer.judge_samples:scripted", share=2.0,
    )  # fmt: skip


def is_usable(access: LearnerAccess) -> bool:
    try:
        access.check()
    except LearnerUnreachable:
        return False
    return True


def descendants(pid: int | None) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.slow
def test_a_child_is_started_used_started_again_after_a_kill_and_ends_with_the_trainer(
    reach: Reach, tmp_path: Path
) -> None:
    access = reach(start=command(tmp_path))
    learner = access.learner_of(settings_of(access, tmp_path), None)
    with pytest.raises(LearnerUnreachable):
        learner.train_round([ROW])  # nothing waits for the start
    eventually(lambda: is_usable(access), 60)
    eventually(lambda: access._probe.status().ready, 60)
    assert learner.train_round([ROW]).step == 1
    assert access._probe.status().agents[0].share == 2.0
    guard = psutil.Process(access.guard_pid)
    for process in descendants(guard.pid):
        process.kill()
    eventually(lambda: access.guard_pid not in (None, guard.pid), 60)
    eventually(lambda: is_usable(access) and access._probe.status().ready, 60)
    with pytest.raises(LearnerUnreachable):
        learner.train_round([ROW])  # what was not saved is lost
    learner.load(None, settings_of(access, tmp_path).learner)
    assert learner.train_round([ROW]).step == 1
    running = descendants(access.guard_pid)
    access.close()
    assert not [process for process in running if process.is_running()]


@pytest.mark.slow
def test_a_child_does_not_outlive_a_trainer_that_is_killed(tmp_path: Path) -> None:
    port = free_port()
    program = (
        "import sys, time; from pathlib import Path; from tests.trainer.test_learner_access import command;"
        "from ratchet.trainer.learner_client import LearnerChild;"
        f"child = LearnerChild(command(Path(sys.argv[1]), {port})); child.keep_running(time.monotonic());"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert trainer.stdout is not None
    guard = int(trainer.stdout.readline())
    eventually(lambda: descendants(guard))
    running = [psutil.Process(guard), *descendants(guard)]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(60)
    trainer.stdout.close()
    eventually(lambda: not [one for one in running if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])


@pytest.mark.slow
def test_a_child_that_exits_again_and_again_ends_the_trainer_with_the_place_of_its_log(
    reach: Reach, tmp_path: Path
) -> None:
    access = reach(start=command(tmp_path, program="raise SystemExit(3)"))
    stopped = threading.Event()
    access.call_on_failure(stopped.set)
    assert stopped.wait(60)
    assert str(tmp_path / "log") in str(access.failure)
    assert "code 3" in str(access.failure)


def test_a_learner_elsewhere_is_used_by_several_trainers(reach: Reach, tmp_path: Path) -> None:
    with scripted_service(ScriptedHost()) as connection:
        first, second = reach(connection.url), reach(connection.url)
        for access in (first, second):
            eventually(lambda access=access: is_usable(access))  # type: ignore[misc]
        assert first.learner_of(settings_of(first, tmp_path), None).train_round([ROW]).step == 1
        first.close()
        second.close()


def test_a_second_learner_of_a_base_model_is_refused_with_the_address_of_the_first(reach: Reach) -> None:
    with scripted_service(ScriptedHost()) as connection:
        first = reach(connection.url)
        eventually(lambda: is_usable(first))
        with scripted_service(ScriptedHost(), instance="there:2:other") as other:
            refused = reach(other.url)
            eventually(lambda: refused.failure)
            assert isinstance(refused.failure, LearnerServiceError)
            assert "the learner at here:1," in str(refused.failure)
            assert "set learner.url to the first" in str(refused.failure)
            with pytest.raises(LearnerServiceError):
                refused.check()
            refused.close()
        assert is_usable(first)
        first.close()


def test_a_learner_that_does_not_answer_is_an_alarm_until_it_does(reach: Reach, store: Store) -> None:
    port = free_port()
    access = reach(f"http://127.0.0.1:{port}", report_seconds=0.1)
    eventually(lambda: [alarm.name for alarm in store.alarms.active()] == [UNREACHABLE])
    assert f"learner.url http://127.0.0.1:{port} does not answer" in store.alarms.active()[0].reason
    with scripted_service(ScriptedHost(), port=port):
        eventually(lambda: is_usable(access) and not store.alarms.active())
        access.close()


def test_a_learner_that_was_restarted_at_its_address_is_taken_at_once(reach: Reach) -> None:
    port = free_port()
    with scripted_service(ScriptedHost(), port=port) as connection:
        access = reach(connection.url, lease_seconds=120)
        eventually(lambda: is_usable(access))
        access.close()
    with scripted_service(ScriptedHost(), port=port, instance="here:1:two") as connection:
        again = reach(connection.url, lease_seconds=120)
        eventually(lambda: is_usable(again), 60)  # before the lease of the first ends
        again.close()


def test_a_wrong_token_ends_the_trainer_and_a_learner_that_does_not_answer_is_an_outage(reach: Reach) -> None:
    with scripted_service(ScriptedHost()) as connection:
        access = reach(connection.url, token="wrong")
        eventually(lambda: access.failure)
        assert isinstance(access.failure, LearnerServiceError)
        assert TOKEN_VARIABLE in str(access.failure)
    silent = reach(f"http://127.0.0.1:{free_port()}")
    eventually(lambda: "does not answer" in silent._pending)
    with pytest.raises(LearnerUnreachable, match=r"learner\.url .* does not answer"):
        silent.check()
