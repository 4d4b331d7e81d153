"""Stop the processes that a project's pid files name: for `down`, and for an `up` after one that was killed.

Only processes with the recorded pid and start time are signalled, with their descendants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.supervisor import pidfile
from ratchet.supervisor.project_lock import running_supervisor

_GUARD_TIMEOUT = 16.0  # seconds: longer than the longest stop timeout of a service
_KILL_TIMEOUT = 3.0


def stop_leftover_processes(state: StateFolder) -> list[str]:
    """Stop every recorded service and process guard that still runs; return the names of the services."""
    stopped: list[str] = []
    found: list[psutil.Process] = []
    for service in SERVICES:
        recorded = [pidfile.running(state.pid(f"{service}.process_guard")), pidfile.running(state.pid(service))]
        running = [process for process in recorded if process is not None]
        if running:
            stopped.append(f"{service} (pid {running[-1].pid})")
            # The process guard stops the service and its descendants; without it, the service itself gets the signal.
            found += [*running, *_descendants(running[0])]
            _suppress_errors(running[0].terminate)
            _suppress_errors(running[0].resume)  # a suspended process would not handle the signal
    _, alive = psutil.wait_procs(found, timeout=_GUARD_TIMEOUT)
    for process in alive:
        kill_tree(process)
    psutil.wait_procs(alive, timeout=_KILL_TIMEOUT)
    for service in SERVICES:
        for name in (service, f"{service}.process_guard"):
            pidfile.remove(state.pid(name))
    pidfile.remove(state.running)
    state.learner_token.unlink(missing_ok=True)
    return stopped


def stop_supervisor(state: StateFolder, within: float) -> int | None:
    """Stop a running `ratchet up` and wait for its end; return its pid, None if there is none."""
    process = running_supervisor(state)
    if process is None:
        pidfile.remove(state.pid("up"))
        return None
    _suppress_errors(process.terminate)
    # It removes its pid file before it ends, so the process itself is waited for.
    _, alive = psutil.wait_procs([process], timeout=within)
    if alive:
        _suppress_errors(process.kill)
    pidfile.remove(state.pid("up"))
    return process.pid


def kill_tree(process: psutil.Process) -> None:
    """Kill a process and its descendants."""
    for one in (*_descendants(process), process):
        _suppress_errors(one.kill)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _suppress_errors(act: Callable[[], object]) -> None:
    with contextlib.suppress(psutil.Error):
        act()
