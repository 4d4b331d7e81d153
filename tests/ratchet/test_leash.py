"""The leash alone: what it ends, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.cli.project import ROOT, is_alive, wait_for

LEASH = ROOT / "ratchet" / "running" / "leash.py"
READY = "print('ready', flush=True)"


def on_leash(script: str, grace: float = 2.0) -> subprocess.Popen[str]:
    """Start a Python script on a leash."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(LEASH), str(grace), sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def room_of(leash: subprocess.Popen[str]) -> int:
    assert leash.stdout is not None
    return int(leash.stdout.readline())


def wait_until_ready(leash: subprocess.Popen[str]) -> None:
    assert leash.stderr is not None
    assert leash.stderr.readline() == "ready\n"


def let_go(leash: subprocess.Popen[str]) -> int:
    leash.communicate(timeout=20)
    return leash.returncode


def let_go_when_done(leash: subprocess.Popen[str]) -> int:
    """Wait for a room that ends by itself; the pipe stays open until it has."""
    code = leash.wait(timeout=20)
    leash.communicate()
    return code


def test_the_exit_code_of_the_room_is_that_of_the_leash() -> None:
    assert let_go_when_done(on_leash("raise SystemExit(7)")) == 7
    assert let_go_when_done(on_leash("import os; os.kill(os.getpid(), 9)")) == 128 + 9


def test_a_closed_pipe_ends_the_room_kindly() -> None:
    leash = on_leash(f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); {READY}; time.sleep(60)")
    room = room_of(leash)
    wait_until_ready(leash)
    assert is_alive(room)
    assert let_go(leash) == 5


def test_a_room_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    leash = on_leash(f"import signal, time; signal.signal(15, signal.SIG_IGN); {READY}; time.sleep(60)", grace=0.5)
    room = room_of(leash)
    wait_until_ready(leash)
    began = time.monotonic()
    assert let_go(leash) == 128 + 9
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
    leash = on_leash("import time; time.sleep(60)")
    room = room_of(leash)
    os.kill(leash.pid, signal.SIGKILL)
    leash.communicate()
    wait_for("the room has ended", lambda: not is_alive(room), seconds=5)
