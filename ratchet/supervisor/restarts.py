"""Restart services that exit, after a growing delay and a bounded number of times, and raise an alarm meanwhile.

The other services keep running. Each exit is reported with the end of the service's log. A service that exits more than
`max_restarts` times within RESTART_WINDOW_SECONDS is given up: without its trainer or learner a project keeps
serving and recording; without vLLM or the proxy it stops (CliError).

A service that shares a GPU with one that exits is stopped, and starts again once that one is ready (`stops_for`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet.errors import CliError
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.store.errors import StoreError
from ratchet.store.store import Store
from ratchet.supervisor import signals
from ratchet.supervisor.service_process import ServiceProcess
from ratchet.supervisor.startup_display import Event

RESTART_WINDOW_SECONDS = 600.0
_MAX_DELAY = 30.0  # seconds
_OPTIONAL_SERVICES = ("trainer", "learner")

RaiseAlarm = Callable[[str, str | None], None]  # service, reason; None clears the alarm


def alarm_name(service: str) -> str:
    """Return the name of a service's alarm."""
    return f"service_down:{service}"


def clear_service_alarms(store: Store) -> None:
    """Clear the alarms of an earlier run. Raises StoreError."""
    for service in SERVICES:
        store.alarms.clear(alarm_name(service))


class ServiceAlarms:
    """Writes the alarms of services in a thread of its own: a store that does not answer delays no restart.

    An alarm that cannot be written is reported as a note and dropped; `up` prints the exit in any case.
    """

    def __init__(self, open_store: Callable[[], Store], on_event: Callable[[Event], None]) -> None:
        self._open = open_store
        self._on_event = on_event
        self._queue: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, service: str, reason: str | None) -> None:
        """Raise the alarm of a service, or clear it if the reason is None. Returns at once."""
        self._queue.put((service, reason))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="service-alarms", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            service, reason = self._queue.get()
            try:
                self._write(alarm_name(service), reason)
            except StoreError as error:
                self._on_event(Event("note", text=f"the alarm {alarm_name(service)} was not stored: {error}"))

    def _write(self, name: str, reason: str | None) -> None:
        store = self._open()
        try:
            if reason is None:
                store.alarms.clear(name)
            else:
                store.alarms.raise_(name, reason)
        finally:
            store.close()


class RestartBackoff:
    """Counts the exits of one service. Pure; `now` is monotonic seconds."""

    def __init__(self, max_restarts: int) -> None:
        self.count = 0
        self._max_restarts = max_restarts
        self._times: deque[float] = deque()

    def record_exit(self, now: float) -> float | None:
        """Record an exit; return the delay in seconds before the restart, None to give the service up."""
        self.count += 1
        self._times.append(now)
        while now - self._times[0] > RESTART_WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) > self._max_restarts:
            return None
        return float(min(_MAX_DELAY, 2 ** (len(self._times) - 1)))


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
        alarm: RaiseAlarm,
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
            return now >= managed.restart_at and self._may_start(child) and self._start(index, managed)
        if child.exit_code is not None:
            return self._on_exit(child, managed, child.ending(), now)
        return managed.starting and self._check_ready(child, managed, now)

    def _may_start(self, child: ServiceProcess) -> bool:
        """Return whether the service that this one stops for is ready, if there is one."""
        other = self._managed.get(child.service.stops_for)
        return other is None or (other.restart_at is None and not other.starting)

    def _start(self, index: int, managed: _ManagedService) -> bool:
        service = self._children[index].service
        with signals.defer_signals():  # a signal must not separate starting a process from recording it
            self._children[index] = ServiceProcess(service, self._state)
        managed.starting, managed.restart_at = True, None
        return True

    def _check_ready(self, child: ServiceProcess, managed: _ManagedService, now: float) -> bool:
        """Check whether a restarted service is ready. One that takes too long is stopped and counts as an exit."""
        seconds = now - child.started_at
        if child.service.ready():
            managed.starting = False
            self._on_event(Event("recovered", child.service.name, seconds=seconds))
            self._alarm(child.service.name, None)
            return True
        if seconds < child.service.start_timeout_seconds:
            return False
        child.finish_stop(time.monotonic() + child.service.stop_timeout_seconds)
        reason = f"was not ready within {child.service.start_timeout_seconds:.0f} s"
        return self._on_exit(child, managed, reason, now)

    def _on_exit(self, child: ServiceProcess, managed: _ManagedService, ending: str, now: float) -> bool:
        child.finish_stop(time.monotonic() + child.service.stop_timeout_seconds)
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
        if name not in _OPTIONAL_SERVICES:
            raise CliError(f"{self._too_often(managed)}; stopping the other services. {log}")
        reason = (
            f"{self._too_often(managed)}; it is not restarted: agents are served and recorded, but nothing is trained "
            "until `ratchet down` and `ratchet up`"
        )
        self._on_event(Event("exited", name, text=f"{reason}. {log}"))
        self._alarm(name, reason)
        return True

    def _stop_dependents(self, name: str, now: float) -> None:
        for child in self._children:
            managed = self._managed[child.service.name]
            if child.service.stops_for == name and not managed.given_up:
                child.finish_stop(time.monotonic() + child.service.stop_timeout_seconds)
                managed.starting, managed.restart_at = False, managed.restart_at or now
                text = f"{child.service.name}: stopped until {name} is ready, which uses the same GPU"
                self._on_event(Event("exited", child.service.name, text=text))

    def _too_often(self, managed: _ManagedService) -> str:
        if not self._max_restarts:
            return managed.reason
        minutes = RESTART_WINDOW_SECONDS / 60
        return f"{managed.reason}; it exited {self._max_restarts + 1} times within {minutes:.0f} minutes (max_restarts)"
