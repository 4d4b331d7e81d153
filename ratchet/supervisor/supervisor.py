"""The supervisor: checks, starts, watches, restarts and stops the services of one project (`up.start_services`).

One supervisor per project. Each service is a child process below its process guard: no service outlives the
supervisor, however it ends. The pid files of a service and its guard exist before `ServiceProcess` returns. Closing
this process's end of the pipe, on purpose or by exiting, stops the service and its descendants. vLLM stops last: until
then the proxy finishes its calls and drains its journal. It prints nothing; it reports through `on_event`.

A service that exits is restarted after a growing delay, with an alarm meanwhile; the others keep running. Each exit is
reported with the end of the service's log. A service that exits more than `max_restarts` times within
RESTART_WINDOW_SECONDS is given up: without its trainer or learner a project keeps serving and recording; without vLLM
or the proxy it stops (CliError). A service that shares a GPU with one that exits is stopped, and starts again once
that one is ready (`stops_for`).
"""

from __future__ import annotations

import json
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

from ratchet import __version__
from ratchet.errors import CliError
from ratchet.proxy.coordinator.keys import key_cache
from ratchet.settings.masking import mask_store_url
from ratchet.settings.project_settings import Settings
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.store.errors import StoreError
from ratchet.store.store import Store, open_store
from ratchet.supervisor import pidfile, preflight_checks, process_guard, services, signals, vllm_command
from ratchet.supervisor.pidfile import ProjectLock, stop_leftover_processes
from ratchet.supervisor.services import LaunchPlan, Service
from ratchet.trainer.learner_client import RESTART_WINDOW_SECONDS, RestartBackoff

_OPTIONAL_SERVICES = ("trainer", "learner")
_POLL = 0.1  # seconds
_STOP_TIMEOUT = 18.0  # seconds for all services together; `down` waits 20
_TAIL_LINES = 12
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Event:
    """What the supervisor does; `seconds` since the start of the service, or of the stop."""

    kind: Literal["note", "starting", "ready", "all_ready", "exited", "recovered", "stopping", "stopped"]
    service: str = ""
    text: str = ""
    seconds: float = 0.0


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
        recorded = [pidfile.write(self._pidfiles[1], self._guard.pid)]
        assert self._guard.stdout is not None
        with self._guard.stdout as stdout:
            line = stdout.readline()
        self.pid = int(line) if line.strip() else self._guard.pid
        recorded.append(pidfile.write(self._pidfiles[0], self.pid))
        self._recorded = [process for process in recorded if process is not None]

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

    def log_end(self) -> str:
        """Return the last lines of its log, with its path."""
        return f"Its log {self.log} ends with:\n{self.tail()}"

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
        pidfile.kill_after(list(filter(pidfile.is_alive, self._recorded)), max(0.0, deadline - time.monotonic()))


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
                with open_store(self._store_url, create=False) as store:
                    if reason is None:
                        store.alarms.clear(name)
                    else:
                        store.alarms.raise_(name, reason)
            except StoreError as error:
                self._on_event(Event("note", text=f"the alarm {name} was not stored: {error}"))


@dataclass(slots=True)
class _Managed:
    """A service: waiting to start at `start_at`, starting, ready, or given up. Without a process it never started."""

    service: Service
    exits: RestartBackoff
    process: ServiceProcess | None = None
    start_at: float | None = 0.0
    is_ready: bool = False
    given_up: bool = False
    reason: str = ""


class Services:
    """The services of a project: `start` all, then `run_once` again and again restarts those that exit; `stop` all.

    `alarm` gets the name of a service and the reason of its alarm; None clears it.
    """

    def __init__(
        self,
        services: Sequence[Service],
        state: StateFolder,
        max_restarts: int,
        on_event: Callable[[Event], None],
        alarm: Callable[[str, str | None], None],
    ) -> None:
        self._managed = {one.name: _Managed(one, RestartBackoff(max_restarts)) for one in services}
        self._state = state
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._alarm = alarm
        self._is_first_start = True

    @property
    def processes(self) -> dict[str, ServiceProcess]:
        """The newest process of each service that was started."""
        return {name: one.process for name, one in self._managed.items() if one.process is not None}

    @property
    def exits(self) -> dict[str, dict[str, Any]]:
        """By service that exited: how often, the last reason, and whether it was given up."""
        return {
            name: {"count": one.exits.count, "reason": one.reason, "given_up": one.given_up}
            for name, one in self._managed.items() if one.exits.count
        }  # fmt: skip

    def start(self, check: Callable[[], None], on_start: Callable[[], None] = lambda: None) -> None:
        """Start each service once those that it starts after are ready; return when all are ready.

        `check` is called again and again meanwhile, and raises to end that; `on_start` after each start. Raises
        CliError if a service exits or is not ready in time.
        """
        while not all(one.is_ready for one in self._managed.values()):
            before = len(self.processes)
            self.run_once(time.monotonic())
            if len(self.processes) > before:
                on_start()
            check()
            time.sleep(_POLL)
        self._is_first_start = False

    def check(self) -> None:
        """Raise CliError if a service has ended."""
        for name, process in self.processes.items():
            if process.exit_code is not None:
                raise CliError(
                    f"{name} (pid {process.pid}) {process.ending()}; stopping the other services. {process.log_end()}"
                )

    def run_once(self, now: float) -> bool:
        """Do what is due at `now` (monotonic); return whether a service was started, became ready or exited."""
        changed = [self._advance(one, now) for one in self._managed.values()]
        return any(changed)

    def stop(self) -> None:
        """Stop every service: vLLM last, for until then the proxy finishes its running calls."""
        began = time.monotonic()
        self._on_event(Event("stopping"))
        last = [process for name, process in self.processes.items() if name == "vllm"]
        first = [process for process in self.processes.values() if process not in last]
        for group in (first, last):
            for process in group:
                process.begin_stop()
            for process in group:
                process.finish_stop(began + _STOP_TIMEOUT)
                self._on_event(Event("stopped", process.service.name, seconds=time.monotonic() - began))

    def _advance(self, one: _Managed, now: float) -> bool:
        if one.given_up:
            return False
        if one.start_at is not None:
            return now >= one.start_at and self._may_start(one.service) and self._start_process(one)
        assert one.process is not None
        if one.process.exit_code is not None:
            if self._is_first_start:
                self.check()
            return self._on_exit(one, one.process, one.process.ending(), now)
        return not one.is_ready and self._check_ready(one, one.process, now)

    def _may_start(self, service: Service) -> bool:
        """Return whether the services that this one waits for are ready: after the first start, that on its GPU."""
        waits_for = service.starts_after if self._is_first_start else (service.stops_for,)
        return all(self._managed[name].is_ready for name in waits_for if name in self._managed)

    def _start_process(self, one: _Managed) -> bool:
        if self._is_first_start:
            self._on_event(Event("starting", one.service.name))
        with signals.defer_signals():  # a signal must not separate starting a process from recording it
            one.process = ServiceProcess(one.service, self._state)
        one.start_at = None
        return True

    def _check_ready(self, one: _Managed, process: ServiceProcess, now: float) -> bool:
        """Check whether a service is ready. One that takes too long is stopped and counts as an exit."""
        service, seconds = one.service, now - process.started_at
        if service.ready():
            one.is_ready = True
            self._on_event(Event("ready" if self._is_first_start else "recovered", service.name, seconds=seconds))
            if not self._is_first_start:
                self._alarm(service.name, None)
            return True
        if seconds < service.start_timeout_seconds:
            return False
        reason = f"was not ready within {service.start_timeout_seconds:.0f} s"
        if self._is_first_start:
            raise CliError(f"{service.name} {reason} (vllm.start_timeout_seconds). {process.log_end()}")
        return self._on_exit(one, process, reason, now)

    def _on_exit(self, one: _Managed, process: ServiceProcess, ending: str, now: float) -> bool:
        process.stop_now()
        name, delay, log = one.service.name, one.exits.record_exit(now), process.log_end()
        self._stop_dependents(name, now)
        one.is_ready = False
        one.reason = reason = f"{name} (pid {process.pid}) {ending}"
        if delay is not None:
            one.start_at = now + delay
            self._on_event(Event("exited", name, text=f"{reason}; it restarts in {delay:.0f} s. {log}"))
            self._alarm(name, f"{reason}; `ratchet up` restarts it, and clears this alarm once it is ready")
            return True
        one.given_up = True
        if self._max_restarts:
            minutes = RESTART_WINDOW_SECONDS / 60
            reason += f"; it exited {self._max_restarts + 1} times within {minutes:.0f} minutes (max_restarts)"
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
        for other in self._managed.values():
            if other.service.stops_for == name and other.process is not None and not other.given_up:
                other.process.stop_now()
                other.is_ready, other.start_at = False, other.start_at or now
                text = f"{other.service.name}: stopped until {name} is ready, which uses the same GPU"
                self._on_event(Event("exited", other.service.name, text=text))


class Supervisor:
    """The services of one project. `on_event` is called in the thread of `start` and `stop`.

    `check_start` is called while `start` waits, and raises to end that.

    `lock` is the project's lock if the caller has acquired it already; `stop` releases it.

    `models_only`: start the proxy alone, for the models of `model_list`; nothing that needs a base model.
    """

    plan: LaunchPlan  # what is started; there after `prepare`

    def __init__(
        self,
        settings: Settings,
        on_event: Callable[[Event], None] = lambda event: None,
        lock: ProjectLock | None = None,
        check_start: Callable[[], None] = lambda: None,
        *,
        models_only: bool = False,
    ) -> None:
        self.settings = settings
        self._models_only = models_only
        self._check_start = check_start
        self.state = settings.state
        self._on_event = on_event
        self._services: Services | None = None
        self._lock = lock
        self._base_model_checked = models_only
        # Where the services read their settings. A run that needs the proxy only keeps those of the last `up`.
        self._resolved = self.state.resolved_models_only if models_only else self.state.resolved

    def prepare(self) -> LaunchPlan:
        """Run every check, acquire the project's lock and choose ports; start nothing yet.

        Raises CliError, ProxyError and StoreError.
        """
        model = None
        if not self._models_only:
            vllm_command.check_installed(self.settings)
            model = vllm_command.check_model(self.settings.base_model)
        self.state.make(min_free_disk_mb=self.settings.min_free_disk_mb)
        if self._lock is None:
            self._lock = ProjectLock(self.state)
        if model is not None:
            if not vllm_command.is_folder(model):
                preflight_checks.check_hub_model(model)
            preflight_checks.check_adapter_store(self.settings)
        for name in stop_leftover_processes(self.state):
            self._note(f"{name} was left over from a run that was killed; it has been stopped")
        plan = services.plan_models_only if self._models_only else services.plan_services
        self.plan = plan(self.settings, config=self._resolved)
        self._prepare_store()
        for note in self.plan.notes:
            self._note(note)
        return self.plan

    def start(self) -> None:
        """Start every service that `prepare` planned, and return when all are ready. Raises CliError."""
        plan, began = self.plan, time.monotonic()
        services.write_resolved_settings(plan.settings, self._resolved)
        self._write_learner_token()
        alarms = ServiceAlarms(self.settings.store_url, self._on_event)
        self._services = Services(plan.services, self.state, self.settings.max_restarts, self._on_event, alarms)
        self._services.start(self._check_start, self._write_run_state)
        if not self._base_model_checked:  # vLLM has downloaded its files by now
            with open_store(self.settings.store_url, create=False) as store:
                preflight_checks.check_base_model(self.settings, store, self._note, serves=True)
        self._write_run_state(ready=True)
        self._on_event(Event("all_ready", text=plan.base_url, seconds=time.monotonic() - began))

    def check(self) -> None:
        """Raise CliError if a service has ended."""
        if self._services is not None:
            self._services.check()

    def watch(self) -> None:
        """Restart services that exit. Raises CliError if a required one is given up."""
        assert self._services is not None, "start() comes first"
        while True:
            if self._services.run_once(time.monotonic()):
                self._write_run_state(ready=True)
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop every service. Safe at any moment and more than once; Ctrl-C does not interrupt it."""
        with signals.ignore_signals():
            started, self._services = self._services, None
            if started is not None and started.processes:
                started.stop()
                self.state.learner_token.unlink(missing_ok=True)
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _prepare_store(self) -> None:
        """Create the schema and version 0 before the services read either. Raises CliError, ProxyError."""
        with open_store(self.settings.store_url) as store:
            key_cache.check_host_has_keys(self.settings.proxy, store.keys.all())
            if not self._models_only:
                for alias in self.settings.agents_by_name:
                    store.policies.register_base(alias, vllm_command.served_name(self.settings))
                self._base_model_checked = preflight_checks.check_base_model(self.settings, store, self._note)
            clear_service_alarms(store)

    def _note(self, text: str) -> None:
        self._on_event(Event("note", text=text))

    def _write_learner_token(self) -> None:
        """Keep the token of the learner that `up` starts where `doctor` finds it."""
        self.state.learner_token.unlink(missing_ok=True)
        if self.plan.learner_token:
            self.state.learner_token.touch(mode=0o600)
            self.state.learner_token.write_text(self.plan.learner_token)

    def _write_run_state(self, *, ready: bool = False) -> None:
        """Write running.json for `status`, `doctor` and `up --detach`."""
        started = self._services
        record = {
            "pid": os.getpid(),
            "ready": ready,
            "version": __version__,
            "project": self.settings.project,
            "model": None if self.settings.agents else self.settings.model,
            "base_model": self.settings.base_model,
            "base_url": self.plan.base_url,
            "proxy_url": self.plan.proxy_url,
            "console": self.plan.console,
            "vllm_url": self.plan.vllm_url,
            "learner_url": self.plan.learner_url,
            "vllm_command": str(self.plan.vllm),
            "store": mask_store_url(self.settings.store_url),
            "started_at": time.time(),
            "services": {name: one.pid for name, one in started.processes.items()} if started else {},
            "exits": started.exits if started else {},
        }
        temporary = self.state.running.with_suffix(".new")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(self.state.running)
