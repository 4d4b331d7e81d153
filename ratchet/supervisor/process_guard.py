"""The process_guard: a small parent process that no room outlives.

    python -I -S process_guard.py GRACE COMMAND...          (stdin: a pipe whose other end only the supervisor holds)

Promises, on Linux: when the supervisor ends in any way, SIGKILL among them, the pipe closes and the room gets SIGTERM,
then SIGKILL after GRACE seconds, and so does everything that the room started, also what left its process group. When
the process_guard itself is killed, the kernel sends the room SIGTERM. SIGTERM to the process_guard ends the room in
the same way. The
process_guard ends last, with the room's exit code (128 + number for a signal). The first line on stdout is the room's
pid; after it, stdout is not used. Elsewhere than on Linux only the room's process group is ended.

Stands alone: only the standard library, no other module of Ratchet, so that it starts in some 30 ms.
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
_LEFTOVER_GRACE = 3.0  # seconds that a room's children get once the room itself has ended


def main(arguments: list[str]) -> int:
    """Run the command on the process_guard; return its exit code."""
    grace, command = float(arguments[0]), arguments[1:]
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the supervisor starts it with signals held back
    if _LINUX:
        # Orphans of the room become children of the process_guard, so that it finds them whatever group they are in.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    room = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, preexec_fn=_die_with_parent(os.getpid())
    )
    os.write(1, f"{room.pid}\n".encode())
    os.close(1)
    _wait_for_end(room, wake)
    if room.poll() is None:
        _stop(room, grace)
    _stop_leftovers(room.pid)
    code = room.returncode
    return code if code >= 0 else 128 - code


def _wake_on(*signals: int) -> int:
    """Turn signals into bytes on a pipe; return its reading end."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


def _wait_for_end(room: subprocess.Popen[bytes], wake: int) -> None:
    """Return when the room has ended, the pipe has closed, or the process_guard was told to stop."""
    while room.poll() is None:
        readable, _, _ = select.select([0, wake], [], [])
        if 0 in readable and not os.read(0, 4096):
            return
        if wake in readable and set(os.read(wake, 4096)) - {signal.SIGCHLD}:
            return


def _stop(room: subprocess.Popen[bytes], grace: float) -> None:
    room.terminate()
    try:
        room.wait(grace)
    except subprocess.TimeoutExpired:
        _signal_all(room.pid, signal.SIGKILL)
        room.wait()


def _stop_leftovers(group: int) -> None:
    """End what the room left behind: first kindly, then not."""
    _signal_all(group, signal.SIGTERM)
    deadline = time.monotonic() + _LEFTOVER_GRACE
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
    """Take in every child that has ended; the process_guard is their last parent."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants(ancestor: int) -> Iterator[int]:
    """Every living process below `ancestor`, read from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (command) state parent ...; the command may hold spaces and brackets.
            state, parent = entry.read_bytes().rpartition(b") ")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = children.get(ancestor, [])
    while found:
        pid = found.pop()
        found.extend(children.get(pid, []))
        yield pid


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """For between fork and exec: ask the kernel to end the room when the process_guard ends."""
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
