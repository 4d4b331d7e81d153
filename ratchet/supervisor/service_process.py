"""One service as a child process below its process guard: start it, watch it, stop it; and several in their order.

The pid files of the service and its guard exist before the constructor returns. Closing this process's end of the pipe,
on purpose or by exiting, stops the service and its descendants.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ratchet.errors import CliError
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile
from ratchet.supervisor.leftover_processes import kill_tree
from ratchet.supervisor.services import Service
from ratchet.supervisor.startup_display import Event

_PROCESS_GUARD = Path(__file__).with_name("process_guard.py")
_POLL = 0.1  # seconds
_TAIL_LINES = 12
_TAIL_BYTES = 16_384
_KILL_TIMEOUT = 3.0  # seconds

Report = Callable[[Event], None]


def start_in_order(
    services: Sequence[Service], start: Callable[[Service], ServiceProcess], check: Callable[[], None], report: Report
) -> None:
    """Start each service once those that it starts after are ready; return when all are ready.

    `check` is called again and again meanwhile, and raises to end that. `report` gets the events of the start. Raises
    CliError.
    """
    waiting, starting, ready = list(services), list[ServiceProcess](), set[str]()
    while waiting or starting:
        for service in [one for one in waiting if ready.issuperset(one.starts_after)]:
            waiting.remove(service)
            report(Event("starting", service.name))
            starting.append(start(service))
        check()
        for child in tuple(starting):
            seconds = time.monotonic() - child.started_at
            if child.service.ready():
                starting.remove(child)
                ready.add(child.service.name)
                report(Event("ready", child.service.name, seconds=seconds))
            elif seconds > child.service.start_timeout_seconds:
                raise CliError(
                    f"{child.service.name} was not ready within {child.service.start_timeout_seconds:.0f} s "
                    f"(vllm.start_timeout_seconds). Its log {child.log} ends with:\n{child.tail()}"
                )
            else:
                report(Event("waiting", child.service.name, seconds=seconds))
        time.sleep(_POLL)


class ServiceProcess:
    """A started service."""

    def __init__(self, service: Service, state: StateFolder) -> None:
        self.service = service
        self.log = state.log(service.name)
        self.started_at = time.monotonic()
        self._pidfiles = (state.pid(service.name), state.pid(f"{service.name}.process_guard"))
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".1.log"))  # keeps the reason why the last run ended
        with self.log.open("wb") as log:
            if service.heading:
                log.write(f"{service.heading}\n".encode())
                log.flush()
            self._guard = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(_PROCESS_GUARD), str(service.stop_timeout_seconds)),
                    *service.command,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(service.environment),
                start_new_session=True,
            )
        identities = [pidfile.write(self._pidfiles[1], self._guard.pid)]
        assert self._guard.stdout is not None
        with self._guard.stdout as stdout:
            line = stdout.readline()
        self.pid = int(line) if line.strip() else self._guard.pid
        identities.append(pidfile.write(self._pidfiles[0], self.pid))
        self._identities = [identity for identity in identities if identity is not None]

    @property
    def exit_code(self) -> int | None:
        """The service's exit code; None while it runs."""
        return self._guard.poll()

    def ending(self) -> str:
        """Describe how the service ended."""
        code = self.exit_code
        if code is None:
            return "is running"
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
        """Close the pipe: the process guard stops the service."""
        if self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.close()

    def finish_stop(self, deadline: float) -> None:
        """Wait for the end until `deadline` (monotonic), then kill guard and service."""
        self.begin_stop()
        try:
            self._guard.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill(deadline)
            self._guard.wait()
        self._kill(deadline)  # if the guard itself was killed, the service has only received SIGTERM
        for path in self._pidfiles:
            pidfile.remove(path)

    def _kill(self, deadline: float) -> None:
        """Kill whatever of guard and service still runs at `deadline`."""
        running = [process for identity in self._identities if (process := identity.process()) is not None]
        _, alive = psutil.wait_procs(running, max(0.0, deadline - time.monotonic()))
        for process in alive:
            kill_tree(process)
        psutil.wait_procs(alive, _KILL_TIMEOUT)
