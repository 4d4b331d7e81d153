"""Services as child processes below their process guards: started in their order, watched, restarted, stopped.

The pid files of a service and its guard exist before the constructor returns. Closing this process's end of the pipe,
on purpose or by exiting, stops the service and its descendants.

A service that exits is restarted after a growing delay, with an alarm meanwhile; the others keep running. Each exit is
reported with the end of the service's log. A service that exits more than `max_restarts` times within
RESTART_WINDOW_SECONDS is given up: without its trainer or learner a project keeps serving and recording; without vLLM
or the proxy it stops (CliError). A service that shares a GPU with one that exits is stopped, and starts again once
that one is ready (`stops_for`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.errors import CliError
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.store.errors import StoreError
from ratchet.store.store import Store, open_store
from ratchet.supervisor import pidfile, process_guard, signals
from ratchet.supervisor.services import Service
from ratchet.trainer.learner_client import RESTART_WINDOW_SECONDS, RestartBackoff

_OPTIONAL_SERVICES = ("trainer", "learner")
_POLL = 0.1  # seconds
_TAIL_LINES = 12
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Event:
    """What the supervisor does; `seconds` since the start of the service, or of the whole project."""

    kind: Literal["note", "starting", "waiting", "ready", "all_ready", "exited", "recovered", "stopping", "stopped"]
    service: str = ""
    text: str = ""
    seconds: float = 0.0


def start_in_order(
    services: Sequence[Service],
    start: Callable[[Service], ServiceProcess],
    check: Callable[[], None],
    report: Callable[[Event], None],
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
                    *(sys.executable, "-I", "-S", process_guard.__file__, str(service.stop_timeout_seconds)),
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
            path.unlink(missing_ok=True)

    def stop_now(self) -> None:
        """Stop it within the service's own stop timeout."""
        self.finish_stop(time.monotonic() + self.service.stop_timeout_seconds)

    def _kill(self, deadline: float) -> None:
        """Kill whatever of guard and service still runs at `deadline`."""
        running = [process for identity in self._identities if (process := identity.process()) is not None]
        pidfile.kill_after(running, max(0.0, deadline - time.monotonic()))


def alarm_name(service: str) -> str:
    return f"service_down:{service}"


def clear_service_alarms(store: Store) -> None:
    """Clear the alarms of an earlier run. Raises StoreError."""
    for service in SERVICES:
        store.alarms.clear(alarm_name(service))


class ServiceAlarms:
    """Writes the alarms of services in a thread of its own: a store that does not answer delays no restart.

    An alarm that cannot be written is reported as a note and dropped; `up` prints the exit in any case.
    """

    def __init__(self, store_url: str, on_event: Callable[[Event], None]) -> None:
        self._store_url = store_url
        self._on_event = on_event
        self._queue: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, service: str, reason: str | None) -> None:
        """Raise the alarm of a service, or clear it if the reason is None. Returns at once."""
        self._queue.put((alarm_name(service), reason))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="service-alarms", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            name, reason = self._queue.get()
            try:
                with contextlib.closing(open_store(self._store_url, create=False)) as store:
                    if reason is None:
                        store.alarms.clear(name)
                    else:
                        store.alarms.raise_(name, reason)
            except StoreError as error:
                self._on_event(Event("note", text=f"the alarm {name} was not stored: {error}"))


@dataclass(slots=True)
class _ManagedService:
    """The state of one service: ready, starting, waiting to restart at `restart_at`, or given up."""

    exits: RestartBackoff
    starting: bool = False
    restart_at: float | None = None
    given_up: bool = False
    reason: str = ""


class RestartManager:
    """Restarts the processes in `children`; a restarted process replaces the one that exited in that list."""

    def __init__(
        self,
        children: list[ServiceProcess],
        state: StateFolder,
        max_restarts: int,
        on_event: Callable[[Event], None],
        alarm: Callable[[str, str | None], None],  # of a service, with the reason; None clears it
    ) -> None:
        self._children = children
        self._state = state
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._alarm = alarm
        self._managed = {child.service.name: _ManagedService(RestartBackoff(max_restarts)) for child in children}

    def exits(self) -> dict[str, dict[str, Any]]:
        """Return, by service that exited: how often, the last reason, and whether it was given up."""
        return {
            name: {"count": managed.exits.count, "reason": managed.reason, "given_up": managed.given_up}
            for name, managed in self._managed.items()
            if managed.exits.count
        }

    def run_once(self, now: float) -> bool:
        """Do what is due; return whether a service exited or was started. Raises CliError."""
        changed = [self._check_service(index, now) for index in range(len(self._children))]
        return any(changed)

    def _check_service(self, index: int, now: float) -> bool:
        child = self._children[index]
        managed = self._managed[child.service.name]
        if managed.given_up:
            return False
        if managed.restart_at is not None:
            if now < managed.restart_at or not self._may_start(child.service):
                return False
            with signals.defer_signals():  # a signal must not separate starting a process from recording it
                self._children[index] = ServiceProcess(child.service, self._state)
            managed.starting, managed.restart_at = True, None
            return True
        if child.exit_code is not None:
            return self._on_exit(child, managed, child.ending(), now)
        return managed.starting and self._check_ready(child, managed, now)

    def _may_start(self, service: Service) -> bool:
        """Return whether the service that this one stops for is ready, if there is one."""
        other = self._managed.get(service.stops_for)
        return other is None or (other.restart_at is None and not other.starting)

    def _check_ready(self, child: ServiceProcess, managed: _ManagedService, now: float) -> bool:
        """Check whether a restarted service is ready. One that takes too long is stopped and counts as an exit."""
        name, seconds = child.service.name, now - child.started_at
        if child.service.ready():
            managed.starting = False
            self._on_event(Event("recovered", name, seconds=seconds))
            self._alarm(name, None)
            return True
        if seconds < child.service.start_timeout_seconds:
            return False
        child.stop_now()
        reason = f"was not ready within {child.service.start_timeout_seconds:.0f} s"
        return self._on_exit(child, managed, reason, now)

    def _on_exit(self, child: ServiceProcess, managed: _ManagedService, ending: str, now: float) -> bool:
        child.stop_now()
        name, delay = child.service.name, managed.exits.record_exit(now)
        self._stop_dependents(name, now)
        managed.reason = f"{name} (pid {child.pid}) {ending}"
        log = f"Its log {child.log} ends with:\n{child.tail()}"
        if delay is not None:
            managed.restart_at = now + delay
            self._on_event(Event("exited", name, text=f"{managed.reason}; it restarts in {delay:.0f} s. {log}"))
            self._alarm(name, f"{managed.reason}; `ratchet up` restarts it, and clears this alarm once it is ready")
            return True
        managed.given_up = True
        reason, times = managed.reason, self._max_restarts + 1
        if self._max_restarts:
            reason += f"; it exited {times} times within {RESTART_WINDOW_SECONDS / 60:.0f} minutes (max_restarts)"
        if name not in _OPTIONAL_SERVICES:
            raise CliError(f"{reason}; stopping the other services. {log}")
        reason += (
            "; it is not restarted: agents are served and recorded, but nothing is trained until `ratchet down` and "
            "`ratchet up`"
        )
        self._on_event(Event("exited", name, text=f"{reason}. {log}"))
        self._alarm(name, reason)
        return True

    def _stop_dependents(self, name: str, now: float) -> None:
        for child in self._children:
            managed = self._managed[child.service.name]
            if child.service.stops_for == name and not managed.given_up:
                child.stop_now()
                managed.starting, managed.restart_at = False, managed.restart_at or now
                text = f"{child.service.name}: stopped until {name} is ready, which uses the same GPU"
                self._on_event(Event("exited", child.service.name, text=text))
