"""Pid files that name one process and never another: the pid with the time at which that process was born.

A pid is recycled; the pair is not. Promises that nothing is signalled that this project did not start.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

# The kernel's boot time, from which births are counted, may be corrected by a second while the machine runs.
_SAME_BIRTH = 2.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process: its pid and when it was born (Unix seconds)."""

    pid: int
    born: float

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs, else None; a recycled pid is None."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.born) > _SAME_BIRTH:
                return None
        except psutil.Error:
            return None
        return process


def write(path: Path, pid: int) -> ProcessIdentity | None:
    """Record a running process; None where it has already ended."""
    try:
        birth = ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.Error:
        return None
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(f"{birth.pid} {birth.born:.2f}\n")
    aside.replace(path)
    return birth


def read(path: Path) -> ProcessIdentity | None:
    """Return what a pid file names, running or not; None where there is none or it is no pid file."""
    try:
        pid, born = path.read_text().split()
        return ProcessIdentity(int(pid), float(born))
    except (OSError, ValueError):
        return None


def running(path: Path) -> psutil.Process | None:
    """Return the process that a pid file names, if it still runs."""
    birth = read(path)
    return birth.process() if birth else None


def remove(path: Path) -> None:
    """Remove a pid file; one that is gone is no error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
