"""Ends what a project's pid files still name: for `down`, and for an `up` after one that was killed.

Only processes whose pid and birth were recorded are touched, with everything below them. Ending what has ended already
is no error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

from ratchet.settings.state_folder import ROOMS, StateFolder
from ratchet.supervisor import pidfile, user_pidfile

_GUARD_TIMEOUT = 16.0  # seconds: longer than the longest grace of a room
_KILL_TIME = 3.0


def stop_leftover_processes(state: StateFolder) -> list[str]:
    """End every recorded room and process_guard that still runs; return the rooms' names."""
    ended: list[str] = []
    found: list[psutil.Process] = []
    for room in ROOMS:
        recorded = [pidfile.running(state.pid(f"{room}.process_guard")), pidfile.running(state.pid(room))]
        running = [process for process in recorded if process is not None]
        if running:
            ended.append(f"{room} (pid {running[-1].pid})")
            # The process_guard ends the room with all that it started; alone, the room is asked itself.
            found += [*running, *_below(running[0])]
            _quietly(running[0].terminate)
            _quietly(running[0].resume)  # a suspended process would not hear it
    _, alive = psutil.wait_procs(found, timeout=_GUARD_TIMEOUT)
    for process in alive:
        kill_tree(process)
    psutil.wait_procs(alive, timeout=_KILL_TIME)
    for room in ROOMS:
        for name in (room, f"{room}.process_guard"):
            pidfile.remove(state.pid(name))
    pidfile.remove(state.running)
    return ended


def stop_supervisor(state: StateFolder, within: float) -> int | None:
    """Ask a running `ratchet up` to stop and wait; return its pid, None where there is none."""
    process = user_pidfile.running(state)
    if process is None:
        pidfile.remove(state.pid("up"))
        return None
    _quietly(process.terminate)
    # Its pid file goes before it does: the process itself is waited for.
    _, alive = psutil.wait_procs([process], timeout=within)
    if alive:
        _quietly(process.kill)
    pidfile.remove(state.pid("up"))
    return process.pid


def kill_tree(process: psutil.Process) -> None:
    """Kill a process and everything below it."""
    for one in (*_below(process), process):
        _quietly(one.kill)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _quietly(act: Callable[[], object]) -> None:
    with contextlib.suppress(psutil.Error):
        act()
