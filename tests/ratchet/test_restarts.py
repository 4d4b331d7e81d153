"""Services that die are started again, and given up at last; real processes on real process guards, the clock is
the test's.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.errors import CliError
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile
from ratchet.supervisor.services import Service
from ratchet.supervisor.supervisor import Event, ServiceProcess, Services
from ratchet.trainer.learner_client import RESTART_WINDOW_SECONDS, RestartBackoff
from tests.harness.cli.project import is_alive, wait_for

SLEEPS = "import time; time.sleep(300)"


class Kept:
    """Services, with their events and alarms."""

    upkeep: Services

    def __init__(self, folder: Path) -> None:
        self.state = StateFolder(folder)
        self.state.make(min_free_disk_mb=0)
        self.events: list[Event] = []
        self.alarms: list[tuple[str, str | None]] = []
        self.now = time.monotonic()

    def service(
        self, name: str, script: str = SLEEPS, ready: Callable[[], bool] = lambda: True, **order: Any
    ) -> Service:
        """Return a service that is a Python script."""
        command = (sys.executable, "-I", "-S", "-c", script)
        return Service(name, command, dict(os.environ), ready, 5.0, 1.0, **order)

    def start(self, *services: Service, most: int = 5) -> Services:
        """Start services, which are restarted so often at most; the events begin after the start."""
        self.upkeep = Services(services, self.state, most, self.events.append, lambda *alarm: self.alarms.append(alarm))
        self.upkeep.start(lambda: None)
        return self.upkeep

    def started(self, *services: Service, most: int = 5) -> Services:
        """Start services, and forget the events of the start."""
        upkeep = self.start(*services, most=most)
        self.events.clear()
        return upkeep

    def turn(self, seconds: float = 0.0) -> bool:
        """Let so much time pass, then let the services be looked at."""
        self.now += seconds
        return self.upkeep.run_once(self.now)

    def process(self, name: str) -> ServiceProcess:
        """Return the newest process of a service."""
        return self.upkeep.processes[name]

    def wait_for_end(self, name: str) -> int:
        """Wait until a service and its process_guard have ended; return its pid."""
        wait_for("the process_guard has ended", lambda: self.process(name).exit_code is not None)
        return self.process(name).pid

    def end(self, name: str, number: int = signal.SIGKILL) -> int:
        """End a service; return its pid once its process_guard has ended, too."""
        os.kill(self.process(name).pid, number)
        return self.wait_for_end(name)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    services = Kept(tmp_path / "project")
    yield services
    for process in services.upkeep.processes.values() if hasattr(services, "upkeep") else ():
        process.finish_stop(time.monotonic() + 5)


def test_the_pause_before_a_restart_grows_and_old_deaths_are_forgotten() -> None:
    exits = RestartBackoff(7)
    assert [exits.record_exit(float(at)) for at in range(8)] == [1, 2, 4, 8, 16, 30, 30, None]
    assert exits.record_exit(RESTART_WINDOW_SECONDS + 6.5) == 2  # the one at 7 s counts yet
    assert exits.count == 9
    assert RestartBackoff(0).record_exit(0.0) is None


def test_a_service_that_dies_is_started_again_after_its_pause_and_the_others_are_left_alone(kept: Kept) -> None:
    answers: list[bool] = [True]
    upkeep = kept.started(kept.service("vllm", ready=lambda: answers[0]), kept.service("proxy"))
    assert not kept.turn()
    answers[0] = False
    first, other = kept.end("vllm", signal.SIGSEGV), kept.process("proxy")
    assert kept.turn()
    assert not kept.turn(0.5)
    assert kept.turn(0.6)
    assert kept.process("vllm").pid != first
    assert kept.process("proxy") is other
    assert is_alive(other.pid)
    assert not kept.turn()
    answers[0] = True
    assert kept.turn()
    assert [(event.kind, event.service) for event in kept.events] == [("exited", "vllm"), ("recovered", "vllm")]
    assert f"vllm (pid {first}) was ended by SIGSEGV; it restarts in 1 s" in kept.events[0].text
    assert [(service, bool(reason)) for service, reason in kept.alarms] == [("vllm", True), ("vllm", False)]
    assert upkeep.exits["vllm"]["count"] == 1


def test_a_trainer_that_dies_again_and_again_is_given_up_and_agents_are_served_on(kept: Kept, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = (
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
        "raise SystemExit('the checkpoint is damaged')"
    )
    upkeep = kept.started(kept.service("proxy"), kept.service("trainer", script), most=1)
    go.touch()
    kept.wait_for_end("trainer")
    assert kept.turn()
    assert kept.turn(1.1)
    kept.wait_for_end("trainer")
    assert kept.turn()
    assert not kept.turn(100.0)
    assert upkeep.exits["trainer"]["given_up"]
    text = kept.events[-1].text
    assert re.search(r"exited with code 1; .* 2 times .*\(max_restarts\); .*not restarted", text)
    assert "the checkpoint is damaged" in text
    assert kept.alarms[-1][1] is not None
    assert is_alive(kept.process("proxy").pid)


def test_what_starts_after_another_service_waits_until_that_one_is_ready(kept: Kept) -> None:
    polls = {"vllm": 0, "learner": 0}

    def ready(name: str) -> Callable[[], bool]:
        def answers() -> bool:
            polls[name] += 1
            return polls[name] > 2

        return answers

    kept.start(
        kept.service("vllm", ready=ready("vllm")),
        kept.service("proxy"),
        kept.service("learner", ready=ready("learner"), starts_after=("vllm",)),
        kept.service("trainer", starts_after=("vllm", "learner")),
    )
    assert [(event.kind, event.service) for event in kept.events] == [
        ("starting", "vllm"), ("starting", "proxy"), ("ready", "proxy"), ("ready", "vllm"),
        ("starting", "learner"), ("ready", "learner"), ("starting", "trainer"), ("ready", "trainer"),
    ]  # fmt: skip


def test_a_service_that_is_not_ready_in_time_ends_the_start_with_the_end_of_its_log(kept: Kept) -> None:
    never = replace(
        kept.service("vllm", "print('loading', flush=True);" + SLEEPS, lambda: False), start_timeout_seconds=0.5
    )
    with pytest.raises(CliError, match=r"vllm was not ready within 0 s(.|\n)*"):
        kept.start(never, kept.service("trainer", starts_after=("vllm",)))
    assert list(kept.upkeep.processes) == ["vllm"]


def test_a_learner_on_vllms_gpu_stops_while_vllm_starts_again_and_starts_once_it_is_ready(kept: Kept) -> None:
    answers = [True]
    upkeep = kept.started(
        kept.service("vllm", ready=lambda: answers[0]), kept.service("proxy"), kept.service("learner", stops_for="vllm")
    )
    learner, proxy = kept.process("learner").pid, kept.process("proxy").pid
    answers[0] = False
    kept.end("vllm")
    assert kept.turn()
    assert not is_alive(learner)
    assert is_alive(proxy)
    assert kept.turn(1.1)  # vLLM starts
    assert not kept.turn(1.0)
    assert kept.process("learner").pid == learner, "the learner waits until vLLM is ready"
    answers[0] = True
    assert kept.turn()
    assert kept.turn()
    assert is_alive(kept.process("learner").pid)
    assert [(event.kind, event.service) for event in kept.events] == [
        ("exited", "learner"), ("exited", "vllm"), ("recovered", "vllm"), ("recovered", "learner"),
    ]  # fmt: skip
    assert set(upkeep.exits) == {"vllm"}, "a learner that was stopped counts no exit"


@pytest.mark.parametrize("name", ["vllm", "proxy"])
def test_without_restarts_the_death_of_a_service_that_is_needed_ends_all(kept: Kept, name: str) -> None:
    kept.started(kept.service(name), most=0)
    kept.end(name)
    with pytest.raises(CliError, match="was ended by SIGKILL; stopping "):
        kept.turn()


def test_a_service_that_hangs_while_it_starts_again_is_ended_and_counts_as_dead(kept: Kept) -> None:
    answers = [True]
    kept.started(kept.service("vllm", ready=lambda: answers[0]), most=3)
    answers[0] = False
    kept.end("vllm")
    kept.turn()
    kept.turn(1.1)
    hung = kept.process("vllm").pid
    assert kept.turn(10.0)
    assert not is_alive(hung)
    assert "was not ready within 5 s; it restarts in 2 s" in kept.events[-1].text


@pytest.mark.slow
def test_a_service_whose_process_guard_is_killed_does_not_run_on_beside_its_successor(kept: Kept) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
    kept.started(kept.service("proxy", script))
    stubborn = kept.process("proxy")
    wait_for("it ignores SIGTERM", lambda: stubborn.tail() != "")
    process_guard = pidfile.running(kept.state.pid("proxy.process_guard"))
    assert process_guard is not None
    psutil.Process(process_guard.pid).kill()
    wait_for("the process_guard has ended", lambda: stubborn.exit_code is not None)
    assert kept.turn()
    assert not is_alive(stubborn.pid)
