"""The lock of a project: one `ratchet up` at a time, named by `run/up.pid`, released by the kernel if it dies.

The owner may start services in the project's state folder, or move the folder. A second pid file outside the state
folder, in a 0700 folder of this user below the system's temporary folder, finds an `up` whose state folder was deleted.
A temporary folder that belongs to somebody else is not used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

import psutil

from ratchet.errors import CliError
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile


class ProjectLock:
    """The lock, acquired on construction. The state folder must exist."""

    def __init__(self, state: StateFolder) -> None:
        """Acquire the lock. Raises CliError, which names the owner."""
        self._state = state
        self._file: IO[str] | None = state.lock.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            self._file = None
            raise already_running(state) from None
        if orphaned_pid(state) is not None:
            self._file.close()
            self._file = None
            raise already_running(state)
        # A command that waits for this `up` must not read the state of the previous one.
        pidfile.remove(state.running)
        pidfile.write(state.pid("up"), os.getpid())
        write_user_pidfile(state)

    def release(self) -> None:
        """Release the lock; more than once is no error."""
        if self._file is None:
            return
        pidfile.remove(self._state.running)
        pidfile.remove(self._state.pid("up"))
        remove_user_pidfile(self._state)
        self._file.close()
        self._file = None


def already_running(state: StateFolder) -> CliError:
    """Return the error that names the owner of a project's lock, and the remedy."""
    owner, project = running_supervisor(state), state.root.name
    pid = f"pid {owner.pid}" if owner else "another process"
    if orphaned_pid(state) is not None:
        pid = f"{pid}, whose state folder was deleted while it ran"
    return CliError(
        f"project {project} is already up ({pid}): use it, stop it with `ratchet down --project {project}`, "
        "or choose another --project"
    )


def running_supervisor(state: StateFolder) -> psutil.Process | None:
    """Return the `ratchet up` of a project, found by either pid file."""
    if (process := pidfile.running(state.pid("up"))) is not None:
        return process
    file = _user_pidfile(state)
    return pidfile.running(file) if file is not None else None


def orphaned_pid(state: StateFolder) -> int | None:
    """Return the pid of an `up` whose state folder was deleted while it ran; None if there is none."""
    process = running_supervisor(state)
    return process.pid if process is not None and pidfile.running(state.pid("up")) is None else None


def write_user_pidfile(state: StateFolder) -> None:
    """Record this process as the project's `up` outside the state folder, if that is possible."""
    if (file := _user_pidfile(state, create=True)) is not None:
        pidfile.write(file, os.getpid())


def remove_user_pidfile(state: StateFolder) -> None:
    """Remove the record outside the state folder."""
    if (file := _user_pidfile(state)) is not None:
        pidfile.remove(file)


def _user_pidfile(state: StateFolder, *, create: bool = False) -> Path | None:
    """Return the pid file outside the state folder; None if its folder is missing or not this user's own."""
    folder = Path(tempfile.gettempdir()) / f"ratchet-{os.getuid()}"
    try:
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    name = hashlib.sha256(str(state.root).encode()).hexdigest()[:32]
    return folder / f"{name}.pid" if ours else None
