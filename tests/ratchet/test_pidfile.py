"""Pid files name one process and never another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile
from ratchet.supervisor.leftover_processes import stop_leftover_processes


def test_a_running_process_is_found(tmp_path: Path) -> None:
    pidfile.write(tmp_path / "a.pid", os.getpid())
    process = pidfile.running(tmp_path / "a.pid")
    assert process is not None
    assert process.pid == os.getpid()


def test_a_recycled_pid_is_not_the_process_that_was_recorded(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.make(min_free_disk_mb=0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        birth = pidfile.write(state.pid("vllm"), other.pid)
        assert birth is not None
        state.pid("vllm").write_text(f"{other.pid} {birth.started_at - 60}\n")
        assert stop_leftover_processes(state) == []
        assert other.poll() is None
        other.kill()
    assert not state.pid("vllm").exists()


def test_a_damaged_pid_file_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "a.pid").write_text("not a pid")
    assert pidfile.running(tmp_path / "a.pid") is None
    assert pidfile.running(tmp_path / "none.pid") is None
