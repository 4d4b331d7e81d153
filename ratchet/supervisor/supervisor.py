"""The supervisor: checks, starts, watches and stops the services of one project (`up.start_services` shows it).

One supervisor per project. No service outlives it, however it ends. An exit is reported with the end of the service's
log. vLLM stops last: until then the proxy finishes its calls and drains its journal. It prints nothing; it reports
through `on_event`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable

from ratchet import __version__
from ratchet.proxy.coordinator.keys import key_cache
from ratchet.settings.masking import mask_store_url
from ratchet.settings.project_settings import Settings
from ratchet.store.store import open_store
from ratchet.supervisor import preflight_checks, services, signals, vllm_command
from ratchet.supervisor.pidfile import ProjectLock, stop_leftover_processes
from ratchet.supervisor.processes import Event, ServiceAlarms, Services, clear_service_alarms
from ratchet.supervisor.services import LaunchPlan

_POLL = 0.1  # seconds


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
            with contextlib.closing(open_store(self.settings.store_url, create=False)) as store:
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
        with contextlib.closing(open_store(self.settings.store_url)) as store:
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
