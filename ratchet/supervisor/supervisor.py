"""The supervisor: starts the rooms of one project, watches them, stops them.

    with Supervisor(settings) as project:        # returns when every room is ready
        agent(base_url=project.plan.base_url)
        project.check()                          # raises ServiceExited if a room has ended
        project.watch()                          # or: starts again what dies, and raises ServiceExited where that is
        no use

Promises: one supervisor a project; nothing outlives it, however it ends; a room that dies is named with the end of its
log; rooms are stopped vLLM last, so that nothing recorded is lost. What it does is told through `on_event`; it prints
nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ratchet import __version__
from ratchet.errors import ServiceExited, ServiceStartTimeout
from ratchet.proxy.coordinator.keys import key_cache
from ratchet.settings import Settings
from ratchet.settings.masking import mask_store_url
from ratchet.supervisor import base_model_check, hub_model_check, service_alarms, services, signals
from ratchet.supervisor import vllm_command as engine
from ratchet.supervisor.events import Event, ignore
from ratchet.supervisor.leftover_processes import stop_leftover_processes
from ratchet.supervisor.project_lock import ProjectLock
from ratchet.supervisor.restarts import RestartManager
from ratchet.supervisor.service_process import ServiceProcess
from ratchet.supervisor.services import Plan

_POLL = 0.1  # seconds
_STOP_WITHIN = 18.0  # seconds for all rooms together; `down` waits 20


class Supervisor:
    """The rooms of one project. `on_event` is called in the thread of `start` and `stop`.

    `lock` is the project's, where the caller has taken it already; `stop` lets it go.
    """

    def __init__(
        self, settings: Settings, on_event: Callable[[Event], None] = ignore, lock: ProjectLock | None = None
    ) -> None:
        self.settings = settings
        self.state = settings.state
        self._on_event = on_event
        self._children: list[ServiceProcess] = []
        self._lock = lock
        self._plan: Plan | None = None
        self._base_is_known = False

    @property
    def plan(self) -> Plan:
        """What was started. Only after `prepare` or `start`."""
        if self._plan is None:
            raise RuntimeError("the supervisor has not been prepared")
        return self._plan

    @property
    def pids(self) -> dict[str, int]:
        """The pid of each room that was started."""
        return {child.room.name: child.pid for child in self._children}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def prepare(self) -> Plan:
        """Check everything that can be checked, take the project, choose ports; start nothing yet.

        Raises DiskFull, AlreadyRunning, VllmNotFound, BaseModelNotFound, OtherBaseModel, PortInUse, SettingsError and
        StoreError.
        """
        engine.check_installed(self.settings)
        model = engine.check_model(self.settings.base_model)
        self.state.make(min_free_disk_mb=self.settings.min_free_disk_mb)
        if self._lock is None:
            self._lock = ProjectLock(self.state)
        if not engine.is_folder(model):
            hub_model_check.check(model)
        for name in stop_leftover_processes(self.state):
            self._note(f"{name} was left over from a run that was killed; it is stopped now")
        self._plan = services.plan(self.settings, config=self.state.resolved)
        self._prepare_store()
        for note in self._plan.notes:
            self._note(note)
        return self._plan

    def start(self) -> None:
        """Start every room and return when all are ready. Raises what `prepare` does, ServiceExited or
        ServiceStartTimeout.
        """
        if self._plan is None:
            self.prepare()
        began = time.monotonic()
        services.write_resolved_settings(self.plan.settings, self.state.resolved)
        for room in self.plan.rooms:
            self._on_event(Event("starting", room.name))
            with signals.defer_signals():  # a child that was started is a child that will be stopped
                self._children.append(ServiceProcess(room, self.state))
        self._record()
        self._wait_until_ready()
        if not self._base_is_known:  # vLLM has downloaded it by now
            self._check_base()
        self._record(ready=True)
        self._on_event(Event("all_ready", text=self.plan.base_url, seconds=time.monotonic() - began))

    def check(self) -> None:
        """Raise ServiceExited if a room has ended."""
        for child in self._children:
            if child.exit_code is not None:
                raise ServiceExited(
                    f"{child.room.name} (pid {child.pid}) {child.ending()}; the others are being stopped. "
                    f"Its log is {child.log}; it ends with:\n{child.tail()}"
                )

    def watch(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Keep the rooms up until `stopped` says so. Raises ServiceExited where one that is needed dies again and
        again.
        """
        from ratchet.store.store import open_store

        url = self.settings.store_url
        alarms = service_alarms.ServiceAlarms(lambda: open_store(url, create=False), self._on_event)
        upkeep = RestartManager(self._children, self.state, self.settings.restarts, self._on_event, alarms)
        while not stopped():
            if upkeep.turn(time.monotonic()):
                self._record(ready=True, died=upkeep.deaths())
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop every room; safe at any moment and more than once. Ctrl-C does not break it."""
        with signals.ignored():
            if self._children:
                self._stop_services()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _stop_services(self) -> None:
        began = time.monotonic()
        self._on_event(Event("stopping"))
        # vLLM last: until then the proxy ends its running calls and drains its journal.
        last = [child for child in self._children if child.room.name == "vllm"]
        first = [child for child in self._children if child not in last]
        for children in (first, last):
            for child in children:
                child.begin_stop()
            for child in children:
                child.finish_stop(began + _STOP_WITHIN)
                self._on_event(Event("stopped", child.room.name, seconds=time.monotonic() - began))
        self._children.clear()

    def _prepare_store(self) -> None:
        """Make the schema and version 0 before the rooms look at either. Raises OtherBaseModel, ProxyError."""
        from ratchet.store.store import open_store

        store = open_store(self.settings.store_url)
        try:
            key_cache.check_host_has_keys(self.settings.proxy_settings(), store.keys.all())
            store.policies.register_base(self.settings.model, engine.served_name(self.settings.model))
            self._base_is_known = base_model_check.check(self.settings, store, self._note)
            service_alarms.clear_all(store)
        finally:
            store.close()

    def _check_base(self) -> None:
        from ratchet.store.store import open_store

        store = open_store(self.settings.store_url, create=False)
        try:
            base_model_check.check(self.settings, store, self._note, serves=True)
        finally:
            store.close()

    def _note(self, text: str) -> None:
        self._on_event(Event("note", text=text))

    def _wait_until_ready(self) -> None:
        waiting = list(self._children)
        while waiting:
            self.check()
            for child in tuple(waiting):
                seconds = time.monotonic() - child.started_at
                if child.room.ready():
                    waiting.remove(child)
                    self._on_event(Event("ready", child.room.name, seconds=seconds))
                elif seconds > child.room.start_timeout_seconds:
                    raise ServiceStartTimeout(
                        f"{child.room.name} was not ready within {child.room.start_timeout_seconds:.0f} s "
                        f"(vllm.start_timeout_seconds). Its log is {child.log}; it ends with:\n{child.tail()}"
                    )
                else:
                    self._on_event(Event("waiting", child.room.name, seconds=seconds))
            time.sleep(_POLL)

    def _record(self, *, ready: bool = False, died: dict[str, Any] | None = None) -> None:
        """Write what runs, and what died, for `status`, `doctor` and `up --detach`."""
        record = {
            "pid": os.getpid(),
            "ready": ready,
            "version": __version__,
            "project": self.settings.project,
            "model": self.settings.model,
            "base_model": self.settings.base_model,
            "base_url": self.plan.base_url,
            "proxy_url": self.plan.proxy_url,
            "console": self.plan.console,
            "vllm_url": self.plan.vllm_url,
            "vllm_command": str(self.plan.vllm),
            "store": mask_store_url(self.settings.store_url),
            "started_at": time.time(),
            "rooms": self.pids,
            "died": died or {},
        }
        aside = self.state.running.with_suffix(".new")
        aside.write_text(json.dumps(record, indent=2) + "\n")
        aside.replace(self.state.running)
