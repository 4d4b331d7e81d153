"""Pid files that identify one process and never another: the pid and the time when that process started.

The kernel reuses pids, but not with the same start time: nothing is signalled that this project did not start.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

# The kernel's boot time, which start times are relative to, may be corrected by a second while the machine runs.
_START_TOLERANCE = 2.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process: its pid and its start time (Unix seconds)."""

    pid: int
    started_at: float

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs, else None. A process that reuses the pid is None."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            if abs(process.create_time() - self.started_at) > _START_TOLERANCE:
                return None
        except psutil.Error:
            return None
        return process


def write(path: Path, pid: int) -> ProcessIdentity | None:
    """Record a running process; return None if it has already ended."""
    try:
        identity = ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.Error:
        return None
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(f"{identity.pid} {identity.started_at:.2f}\n")
    temporary.replace(path)
    return identity


def read(path: Path) -> ProcessIdentity | None:
    """Return the process that a pid file names, running or not; None if there is no valid pid file."""
    try:
        pid, started_at = path.read_text().split()
        return ProcessIdentity(int(pid), float(started_at))
    except (OSError, ValueError):
        return None


def running(path: Path) -> psutil.Process | None:
    """Return the process that a pid file names, if it still runs."""
    identity = read(path)
    return identity.process() if identity else None


def remove(path: Path) -> None:
    """Remove a pid file; a missing one is no error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
