"""The process_guard alone: what it ends, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.cli.project import ROOT, is_alive, wait_for

PROCESS_GUARD = ROOT / "ratchet" / "supervisor" / "process_guard.py"
READY = "print('ready', flush=True)"


def start_guarded(script: str, grace: float = 2.0) -> subprocess.Popen[str]:
    """Start a Python script on a process_guard."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROCESS_GUARD), str(grace), sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def service_pid(process_guard: subprocess.Popen[str]) -> int:
    assert process_guard.stdout is not None
    return int(process_guard.stdout.readline())


def wait_until_ready(process_guard: subprocess.Popen[str]) -> None:
    assert process_guard.stderr is not None
    assert process_guard.stderr.readline() == "ready\n"


def close_pipe(process_guard: subprocess.Popen[str]) -> int:
    process_guard.communicate(timeout=120)
    return process_guard.returncode


def wait_for_exit(process_guard: subprocess.Popen[str]) -> int:
    """Wait for a service that ends by itself; the pipe stays open until it has."""
    code = process_guard.wait(timeout=120)
    process_guard.communicate()
    return code


def test_the_exit_code_of_the_service_is_that_of_the_process_guard() -> None:
    assert wait_for_exit(start_guarded("raise SystemExit(7)")) == 7
    assert wait_for_exit(start_guarded("import os; os.kill(os.getpid(), 9)")) == 128 + 9


def test_a_closed_pipe_ends_the_service_kindly() -> None:
    process_guard = start_guarded(
        f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); {READY}; time.sleep(60)"
    )
    service = service_pid(process_guard)
    wait_until_ready(process_guard)
    assert is_alive(service)
    assert close_pipe(process_guard) == 5


def test_a_service_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    process_guard = start_guarded(
        f"import signal, time; signal.signal(15, signal.SIG_IGN); {READY}; time.sleep(60)", grace=0.5
    )
    service = service_pid(process_guard)
    wait_until_ready(process_guard)
    began = time.monotonic()
    assert close_pipe(process_guard) == 128 + 9
    assert 0.4 < time.monotonic() - began < 15
    assert not is_alive(service)


def test_what_a_service_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = (
        "import subprocess, sys, pathlib\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"pathlib.Path({str(file)!r}).write_text(str(p.pid))"
    )
    assert wait_for_exit(start_guarded(script)) == 0
    assert not is_alive(int(file.read_text()))


def test_killing_the_process_guard_ends_the_service() -> None:
    process_guard = start_guarded("import time; time.sleep(60)")
    service = service_pid(process_guard)
    os.kill(process_guard.pid, signal.SIGKILL)
    process_guard.communicate()
    wait_for("the service has ended", lambda: not is_alive(service), seconds=30)
