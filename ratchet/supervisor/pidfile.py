"""Which processes of a project run: pid files, the lock of one `ratchet up` at a time, the end of what is left over.

A pid file identifies one process and never another, by the pid and the time when that process started. The kernel
reuses pids, but not with the same start time: nothing is signalled that this project did not start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from ratchet.errors import CliError
from ratchet.settings.state_folder import SERVICES, StateFolder

# The kernel's boot time, which start times are relative to, may be corrected by a second while the machine runs.
_START_TOLERANCE = 2.0
_GUARD_TIMEOUT = 16.0  # seconds: longer than the longest stop timeout of a service
_KILL_TIMEOUT = 3.0


def write(path: Path, pid: int) -> psutil.Process | None:
    """Record a running process and return it; None if it has already ended."""
    try:
        process = psutil.Process(pid)
        started_at = process.create_time()
    except psutil.Error:
        return None
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(f"{pid} {started_at:.2f}\n")
    temporary.replace(path)
    return process


def running(path: Path) -> psutil.Process | None:
    """Return the process that a pid file names, if it still runs; None without a valid pid file."""
    try:
        pid, started_at = path.read_text().split()
        process = psutil.Process(int(pid))
        is_same = abs(process.create_time() - float(started_at)) <= _START_TOLERANCE
        return process if is_same and is_alive(process) else None
    except (OSError, ValueError, psutil.Error):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that reuses its pid is another."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class ProjectLock:
    """The lock of a project, named by `run/up.pid`, acquired on construction, released by the kernel if it dies.

    The owner may start services in the project's state folder, which must exist, or move the folder.
    """

    def __init__(self, state: StateFolder) -> None:
        """Acquire the lock. Raises CliError, which names the owner."""
        self._state = state
        self._file: IO[str] | None = state.lock.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if orphaned_pid(state) is not None:
                raise BlockingIOError
        except BlockingIOError:
            self._file.close()
            self._file = None
            raise already_running(state) from None
        # A command that waits for this `up` must not read the state of the previous one.
        state.running.unlink(missing_ok=True)
        write(state.pid("up"), os.getpid())
        write_user_pidfile(state)

    def release(self) -> None:
        """Release the lock; more than once is no error."""
        if self._file is None:
            return
        self._state.running.unlink(missing_ok=True)
        self._state.pid("up").unlink(missing_ok=True)
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


# A second pid file outside the state folder, in a 0700 folder of this user below the system's temporary folder, finds
# an `up` whose state folder was deleted. A temporary folder that belongs to somebody else is not used.


def running_supervisor(state: StateFolder) -> psutil.Process | None:
    """Return the `ratchet up` of a project, found by either pid file."""
    if (process := running(state.pid("up"))) is not None:
        return process
    file = _user_pidfile(state)
    return running(file) if file is not None else None


def orphaned_pid(state: StateFolder) -> int | None:
    """Return the pid of an `up` whose state folder was deleted while it ran; None if there is none."""
    process = running_supervisor(state)
    return process.pid if process is not None and running(state.pid("up")) is None else None


def write_user_pidfile(state: StateFolder) -> None:
    """Record this process as the project's `up` outside the state folder, if that is possible."""
    if (file := _user_pidfile(state, create=True)) is not None:
        write(file, os.getpid())


def remove_user_pidfile(state: StateFolder) -> None:
    if (file := _user_pidfile(state)) is not None:
        file.unlink(missing_ok=True)


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


def stop_supervisor(state: StateFolder, within: float) -> int | None:
    """Stop a running `ratchet up` and wait for its end; return its pid, None if there is none."""
    process = running_supervisor(state)
    if process is not None:
        _try(process.terminate)
        # It removes its pid file before it ends, so the process itself is waited for.
        _, alive = psutil.wait_procs([process], timeout=within)
        if alive:
            _try(process.kill)
    state.pid("up").unlink(missing_ok=True)
    return None if process is None else process.pid


def stop_leftover_processes(state: StateFolder) -> list[str]:
    """Stop every recorded service and process guard that still runs; return the names of the services.

    For `down`, and for an `up` after one that was killed. Only processes with the recorded pid and start time are
    signalled, with their descendants.
    """
    stopped: list[str] = []
    found: list[psutil.Process] = []
    files = {name: (state.pid(f"{name}.process_guard"), state.pid(name)) for name in SERVICES}
    for service, recorded in files.items():
        alive = [process for path in recorded if (process := running(path)) is not None]
        if alive:
            stopped.append(f"{service} (pid {alive[-1].pid})")
            # The process guard stops the service and its descendants; without it, the service itself gets the signal.
            found += [*alive, *_descendants(alive[0])]
            _try(alive[0].terminate)
            _try(alive[0].resume)  # a suspended process would not handle the signal
    kill_after(found, _GUARD_TIMEOUT)
    for path in (*(path for recorded in files.values() for path in recorded), state.running, state.learner_token):
        path.unlink(missing_ok=True)
    return stopped


def kill_after(processes: list[psutil.Process], seconds: float) -> None:
    """Wait for the end of processes, then kill those that still run, with their descendants."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        kill_tree(process)
    psutil.wait_procs(alive, timeout=_KILL_TIMEOUT)


def kill_tree(process: psutil.Process) -> None:
    for one in (*_descendants(process), process):
        _try(one.kill)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _try(act: Callable[[], object]) -> None:
    with contextlib.suppress(psutil.Error):
        act()
