"""Who runs a project, written down outside of its state folder too: a folder that is deleted takes no process along.

A pid file in the system's temporary folder, in a folder of this user alone (0700), named by the state folder's path. A
folder there that is not this user's own is not used. Where nothing can be written, nothing is promised.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import psutil

from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile


def write(state: StateFolder) -> None:
    """Write down that this process runs the project."""
    if (file := _file(state, make=True)) is not None:
        pidfile.write(file, os.getpid())


def remove(state: StateFolder) -> None:
    """This process runs the project no more."""
    if (file := _file(state)) is not None:
        pidfile.remove(file)


def running(state: StateFolder) -> psutil.Process | None:
    """Return the `ratchet up` that runs a project, by the state folder's word or the one outside of it."""
    if (process := pidfile.running(state.pid("up"))) is not None:
        return process
    file = _file(state)
    return pidfile.running(file) if file is not None else None


def orphaned_pid(state: StateFolder) -> int | None:
    """Return the pid of an `up` whose state folder was deleted while it ran; None where there is none."""
    process = running(state)
    return process.pid if process is not None and pidfile.running(state.pid("up")) is None else None


def _file(state: StateFolder, *, make: bool = False) -> Path | None:
    folder = Path(tempfile.gettempdir()) / f"ratchet-{os.getuid()}"
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    name = hashlib.sha256(str(state.root).encode()).hexdigest()[:32]
    return folder / f"{name}.pid" if ours else None
