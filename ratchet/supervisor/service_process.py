"""One room as a child process on its process_guard: started, watched, stopped.

Promises: the room and its process_guard are recorded by pid and birth before `start` returns; closing this process's
end of the pipe, on purpose or by its death, ends the room and all that it started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile
from ratchet.supervisor.leftover_processes import kill_tree
from ratchet.supervisor.services import Room

_PROCESS_GUARD = Path(__file__).with_name("process_guard.py")
_TAIL_LINES = 12
_KILL_TIME = 3.0  # seconds
_TAIL_BYTES = 16_384


class ServiceProcess:
    """A started room."""

    def __init__(self, room: Room, state: StateFolder) -> None:
        self.room = room
        self.log = state.log(room.name)
        self.started_at = time.monotonic()
        self._pids = (state.pid(room.name), state.pid(f"{room.name}.process_guard"))
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".1.log"))  # why the last run ended stays readable
        with self.log.open("wb") as log:
            if room.heading:
                log.write(f"{room.heading}\n".encode())
                log.flush()
            self._leash = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROCESS_GUARD), str(room.grace), *room.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(room.environment),
                start_new_session=True,
            )
        births = [pidfile.write(self._pids[1], self._leash.pid)]
        assert self._leash.stdout is not None
        with self._leash.stdout as said:
            line = said.readline()
        self.pid = int(line) if line.strip() else self._leash.pid
        births.append(pidfile.write(self._pids[0], self.pid))
        self._births = [birth for birth in births if birth is not None]

    @property
    def exit_code(self) -> int | None:
        """The room's exit code; None while it runs."""
        return self._leash.poll()

    def ending(self) -> str:
        """Return in words how the room ended."""
        code = self.exit_code
        if code is None:
            return "still runs"
        number = code - 128 if code > 128 else -code
        if code < 0 or code > 128:
            try:
                return f"was ended by {signal.Signals(number).name}"
            except ValueError:
                pass
        return f"exited with code {code}"

    def tail(self) -> str:
        """Return the last lines of the log, indented."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])

    def begin_stop(self) -> None:
        """Close the pipe: the process_guard now ends the room."""
        if self._leash.stdin and not self._leash.stdin.closed:
            self._leash.stdin.close()

    def finish_stop(self, deadline: float) -> None:
        """Wait for the end until `deadline` (monotonic), then end process_guard and room by force."""
        self.begin_stop()
        try:
            self._leash.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill(deadline)
            self._leash.wait()
        self._kill(deadline)  # a process_guard that was killed has only asked the room to end
        for path in self._pids:
            pidfile.remove(path)

    def _kill(self, deadline: float) -> None:
        """End what still runs of process_guard and room by force, at `deadline`."""
        running = [process for birth in self._births if (process := birth.process()) is not None]
        _, alive = psutil.wait_procs(running, max(0.0, deadline - time.monotonic()))
        for process in alive:
            kill_tree(process)
        psutil.wait_procs(alive, _KILL_TIME)
