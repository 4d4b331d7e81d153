"""The lock of a project: one holder at a time, named by `run/up.pid`, let go by the kernel if its holder dies.

Whoever has it may start rooms in the project's state folder, or move the folder.
"""

from __future__ import annotations

import fcntl
import os
from typing import IO

from ratchet.errors import AlreadyRunning
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile, user_pidfile


class ProjectLock:
    """A project that is held. The state folder must have been made."""

    def __init__(self, state: StateFolder) -> None:
        """Take the project. Raises AlreadyRunning, which names the holder."""
        self._state = state
        self._file: IO[str] | None = state.lock.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            self._file = None
            raise already_running(state) from None
        if user_pidfile.orphaned_pid(state) is not None:
            self._file.close()
            self._file = None
            raise already_running(state)
        # Whoever waits for this holder to be ready must not see what the last one wrote.
        pidfile.remove(state.running)
        pidfile.write(state.pid("up"), os.getpid())
        user_pidfile.write(state)

    def release(self) -> None:
        """Let the project go; more than once is no error."""
        if self._file is not None:
            pidfile.remove(self._state.running)
            pidfile.remove(self._state.pid("up"))
            user_pidfile.remove(self._state)
            self._file.close()
            self._file = None


def already_running(state: StateFolder) -> AlreadyRunning:
    """Return the error that names who holds a project, and what to do."""
    holder, project = user_pidfile.running(state), state.root.name
    pid = f"pid {holder.pid}" if holder else "another process"
    if user_pidfile.orphaned_pid(state) is not None:
        pid = f"{pid}, whose state folder was deleted while it ran"
    return AlreadyRunning(
        f"project {project} is already up ({pid}): use it, stop it with `ratchet down --project {project}`, "
        "or choose another --project"
    )
