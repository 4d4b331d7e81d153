"""The process_guard alone: what it ends, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.cli.project import ROOT, is_alive, wait_for

LEASH = ROOT / "ratchet" / "running" / "process_guard.py"
READY = "print('ready', flush=True)"


def on_leash(script: str, grace: float = 2.0) -> subprocess.Popen[str]:
    """Start a Python script on a process_guard."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(LEASH), str(grace), sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def room_of(process_guard: subprocess.Popen[str]) -> int:
    assert process_guard.stdout is not None
    return int(process_guard.stdout.readline())


def wait_until_ready(process_guard: subprocess.Popen[str]) -> None:
    assert process_guard.stderr is not None
    assert process_guard.stderr.readline() == "ready\n"


def let_go(process_guard: subprocess.Popen[str]) -> int:
    process_guard.communicate(timeout=20)
    return process_guard.returncode


def let_go_when_done(process_guard: subprocess.Popen[str]) -> int:
    """Wait for a room that ends by itself; the pipe stays open until it has."""
    code = process_guard.wait(timeout=20)
    process_guard.communicate()
    return code


def test_the_exit_code_of_the_room_is_that_of_the_leash() -> None:
    assert let_go_when_done(on_leash("raise SystemExit(7)")) == 7
    assert let_go_when_done(on_leash("import os; os.kill(os.getpid(), 9)")) == 128 + 9


def test_a_closed_pipe_ends_the_room_kindly() -> None:
    process_guard = on_leash(
        f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); {READY}; time.sleep(60)"
    )
    room = room_of(process_guard)
    wait_until_ready(process_guard)
    assert is_alive(room)
    assert let_go(process_guard) == 5


def test_a_room_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    process_guard = on_leash(
        f"import signal, time; signal.signal(15, signal.SIG_IGN); {READY}; time.sleep(60)", grace=0.5
    )
    room = room_of(process_guard)
    wait_until_ready(process_guard)
    began = time.monotonic()
    assert let_go(process_guard) == 128 + 9
    assert 0.4 < time.monotonic() - began < 15
    assert not is_alive(room)


def test_what_a_room_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = (
        "import subprocess, sys, pathlib\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"pathlib.Path({str(file)!r}).write_text(str(p.pid))"
    )
    assert let_go_when_done(on_leash(script)) == 0
    assert not is_alive(int(file.read_text()))


def test_killing_the_leash_ends_the_room() -> None:
    process_guard = on_leash("import time; time.sleep(60)")
    room = room_of(process_guard)
    os.kill(process_guard.pid, signal.SIGKILL)
    process_guard.communicate()
    wait_for("the room has ended", lambda: not is_alive(room), seconds=5)
