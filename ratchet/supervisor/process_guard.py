"""The process guard: a small parent process that stops a service when the supervisor ends.

    python -I -S process_guard.py STOP_TIMEOUT COMMAND...   (stdin: a pipe whose other end only the supervisor has)

On Linux: when the supervisor ends in any way, including SIGKILL, the pipe closes. The guard then sends the service
SIGTERM, and SIGKILL after STOP_TIMEOUT seconds; every descendant of the service is stopped too, also one that left its
process group. If the guard itself is killed, the kernel sends the service SIGTERM. SIGTERM to the guard stops the
service in the same way. The guard exits last, with the service's exit code (128 + number for a signal). The first line
on stdout is the service's pid; after it, stdout is not used. On other systems only the process group is stopped.

Imports only the standard library and no module of Ratchet, so that it starts in about 30 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform.startswith("linux")
_LEFTOVER_TIMEOUT = 3.0  # seconds that a service's children get after the service has ended


def main(arguments: list[str]) -> int:
    """Run the command under the guard; return its exit code."""
    stop_timeout, command = float(arguments[0]), arguments[1:]
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the supervisor starts it with signals blocked
    if _LINUX:
        # Orphans of the service become children of the guard, which finds them whatever group they are in.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    service = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, preexec_fn=_die_with_parent(os.getpid())
    )
    os.write(1, f"{service.pid}\n".encode())
    os.close(1)
    _wait_for_end(service, wake)
    if service.poll() is None:
        _stop(service, stop_timeout)
    _stop_leftovers(service.pid)
    code = service.returncode
    return code if code >= 0 else 128 - code


def _wake_on(*signals: int) -> int:
    """Turn signals into bytes on a pipe; return the read end."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


def _wait_for_end(service: subprocess.Popen[bytes], wake: int) -> None:
    """Return when the service has ended, the pipe has closed, or the guard received a signal to stop."""
    while service.poll() is None:
        readable, _, _ = select.select([0, wake], [], [])
        if 0 in readable and not os.read(0, 4096):
            return
        if wake in readable and set(os.read(wake, 4096)) - {signal.SIGCHLD}:
            return


def _stop(service: subprocess.Popen[bytes], stop_timeout: float) -> None:
    service.terminate()
    try:
        service.wait(stop_timeout)
    except subprocess.TimeoutExpired:
        _signal_all(service.pid, signal.SIGKILL)
        service.wait()


def _stop_leftovers(group: int) -> None:
    """Stop the descendants of the service: SIGTERM, then SIGKILL."""
    _signal_all(group, signal.SIGTERM)
    deadline = time.monotonic() + _LEFTOVER_TIMEOUT
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    while _alive(group):
        _signal_all(group, signal.SIGKILL)
        time.sleep(0.02)


def _alive(group: int) -> bool:
    _reap()
    if _LINUX:
        return any(True for _ in _descendants(os.getpid()))
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal_all(group: int, number: int) -> None:
    for kill, target in [(os.killpg, group), *((os.kill, pid) for pid in _descendants(os.getpid()))]:
        try:
            kill(target, number)
        except (ProcessLookupError, PermissionError):
            continue


def _reap() -> None:
    """Reap every child that has ended; the guard is their last parent."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants(ancestor: int) -> Iterator[int]:
    """Yield every living descendant of `ancestor`, read from /proc; none without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (command) state parent ...; the command may hold spaces and brackets.
            state, parent = entry.read_bytes().rpartition(b") ")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = children.get(ancestor, [])
    while found:
        pid = found.pop()
        found.extend(children.get(pid, []))
        yield pid


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return a function to run between fork and exec that makes the kernel signal the service when the guard ends."""
    if not _LINUX:
        return None

    def ask() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
