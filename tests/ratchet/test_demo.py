"""`ratchet demo` beside other projects: it is always its own, and one at a time. vLLM is scripted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ratchet.demo.report import describe_next_steps
from ratchet.supervisor.pidfile import kill_tree
from tests.harness.cli.project import INTERRUPTED, ROOT, SCRIPTED_VLLM, wait_for


class DemoRun:
    """The demo as a process in a session of its own, with a package `vllm` that is the scripted one."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state" / "demo"
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        server = folder / "packages" / "vllm" / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True)
        for package in (server.parent, server.parents[1], server.parents[2]):
            (package / "__init__.py").touch()
        server.write_text(f"import runpy\nrunpy.run_path({str(SCRIPTED_VLLM)!r}, run_name='__main__')\n")

    def start(self, **environ: str) -> subprocess.Popen[str]:
        """Start `ratchet demo`."""
        path = f"{self._folder / 'packages'}{os.pathsep}{ROOT}"
        process = subprocess.Popen(
            [sys.executable, "-m", "ratchet", "demo", "--state-dir", str(self._folder / "state")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def begin(self) -> subprocess.Popen[str]:
        """Start `ratchet demo` and return it once it has the project and has made its mailbox."""
        process = self.start()
        pid = self.state / "run" / "up.pid"

        def has_started() -> bool:
            holds = pid.exists() and pid.read_text().startswith(f"{process.pid} ")
            return holds and (self.state / "email_search").exists()

        wait_for("the demo has started", has_started)
        return process

    def stop(self) -> None:
        """Leave nothing running."""
        for process in self._started:
            if process.poll() is None:
                kill_tree(psutil.Process(process.pid))
            process.communicate()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[DemoRun]:
    run = DemoRun(tmp_path)
    yield run
    run.stop()


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C in a process's terminal: its whole group gets it. Return its output; nothing may be left."""
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in INTERRUPTED, output
    assert "Traceback" not in output
    assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    return output


@pytest.mark.slow
def test_the_users_own_variables_do_not_reach_the_demo_and_are_named(demo: DemoRun, tmp_path: Path) -> None:
    own = tmp_path / "state" / "mail"
    own.mkdir(parents=True)
    process = demo.start(RATCHET_PROJECT="mail", RATCHET_STORE=f"sqlite:///{tmp_path / 'mine.db'}", RATCHET_MODEL="m")
    recorded = demo.state / "run" / "running.json"
    wait_for("the services are started", recorded.exists, seconds=120)
    running = json.loads(recorded.read_text())
    output = interrupt(process)
    assert "its own settings: RATCHET_MODEL, RATCHET_PROJECT, RATCHET_STORE\n" in output
    assert (running["project"], running["model"]) == ("demo", "email-agent")
    assert running["store"] == f"sqlite:///{demo.state / 'store.db'}"
    assert own.is_dir()
    assert not (tmp_path / "mine.db").exists()


@pytest.mark.slow
def test_a_second_demo_is_refused_and_moves_nothing(demo: DemoRun) -> None:
    first = demo.begin()
    second = demo.start()
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 1
    assert f"(pid {first.pid})" in output
    assert "ratchet down --project demo" in output
    assert demo.state.is_dir()
    assert not demo.state.with_name("demo.last").exists()
    interrupt(first)


@pytest.mark.slow
def test_a_demo_after_a_demo_keeps_the_last_one(demo: DemoRun) -> None:
    for _ in range(2):
        interrupt(demo.begin())
    assert (demo.state.with_name("demo.last") / "email_search").is_dir()
    assert not (demo.state / "run" / "up.pid").exists()


def test_the_demo_says_what_shows_more_of_it_where_it_left_it(tmp_path: Path) -> None:
    here = describe_next_steps("/x/.venv/bin/ratchet", Path(".ratchet").resolve() / "demo")
    assert "/x/.venv/bin/ratchet status --project demo" in here
    assert "RATCHET_STATE_DIR" not in here
    assert f"RATCHET_STATE_DIR={tmp_path} ratchet status" in describe_next_steps("__main__.py", tmp_path / "demo")
