"""`ratchet up`, `down` and `reload`: a project's services in the foreground, in the background, or for one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from ratchet.errors import CliError
from ratchet.settings.agents_watch import changed_agents, with_agents_of
from ratchet.settings.load_settings import load
from ratchet.settings.masking import MASK
from ratchet.settings.project_settings import Settings
from ratchet.settings.setting_errors import listed
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.store.records import BASE_VERSION
from ratchet.store.store import open_store
from ratchet.supervisor import pidfile, preflight_checks, services, signals
from ratchet.supervisor.pidfile import ProjectLock, already_running, orphaned_pid, running_supervisor
from ratchet.supervisor.supervisor import Event, Supervisor

_STOP_TIMEOUT = 20.0  # seconds for an `up` to stop its services
_POLL = 0.1


@dataclass(frozen=True, slots=True)
class ProjectServices:
    """Where agents send their calls; `check` raises once the services have ended."""

    base_url: str
    check: Callable[[], None]


def run_foreground(settings: Settings) -> None:
    """Start the services and supervise them until Ctrl-C, SIGTERM, or an exit that cannot be recovered."""
    with start_services(settings, announce=lambda text: print(text, flush=True)) as supervisor:
        plan = supervisor.plan
        named = names_of_agents(settings)
        print(f"base_url: {plan.base_url}   {named}   (Ctrl-C stops everything)", flush=True)
        if plan.console:
            print(f"console: {plan.console}", flush=True)
        supervisor.watch()


def names_of_agents(settings: Settings) -> str:
    """Return what agents send as `model`, for a line of output."""
    return f"agents: {listed(settings.agents)}" if settings.agents else f"model: {settings.model}"


@contextmanager
def start_services(
    settings: Settings,
    lock: ProjectLock | None = None,
    announce: Callable[[str], None] = print,
    check: Callable[[], None] | None = None,
    *,
    models_only: bool = False,
) -> Iterator[Supervisor]:
    """Start the services; they stop at the end of the block, however it ends. Raises what `Supervisor.prepare` does.

    `check` is called while they start, and raises to stop that; None: a signal does, because this process is a command.
    `models_only`: start the proxy alone, for the models of `model_list`.
    """
    if check is None:
        signals.install_handlers()
    with StartupDisplay() as show:
        supervisor = Supervisor(settings, show, lock, check or (lambda: None), models_only=models_only)
        try:
            supervisor.prepare()
            if models_only:
                announce(f"no vLLM is needed: the proxy serves {listed(settings.listed_models)} for this run")
            else:
                announce(f"vLLM: starting {settings.base_model}; its command is in {settings.state.log('vllm')}")
            supervisor.start()
            yield supervisor
        finally:
            supervisor.stop()


@contextmanager
def attach_or_start(
    settings: Settings,
    announce: Callable[[str], None] = print,
    check: Callable[[], None] | None = None,
    *,
    models_only: bool = False,
) -> Iterator[ProjectServices]:
    """Use the project's running services, or start them for the block (`start_services`).

    Raises CliError if the project is still starting, or runs without vLLM or with another base model.
    """
    running = read_run_state(settings.state)
    if not running:
        with start_services(settings, announce=announce, check=check, models_only=models_only) as supervisor:
            yield ProjectServices(supervisor.plan.base_url, supervisor.check)
        return
    if not running.get("ready"):
        raise CliError(f"project {settings.project} is still starting (pid {running['pid']}): wait until it is ready")
    if running.get("vllm_url") is None and not models_only:
        raise CliError(
            f"project {settings.project} runs without vLLM, for a run on models of model_list (pid {running['pid']}): "
            "wait until that has ended"
        )
    if not models_only:
        _check_base_model(settings, running)

    def check_project() -> None:
        if read_run_state(settings.state).get("pid") != running["pid"]:
            raise CliError(f"project {settings.project} was stopped (pid {running['pid']} is gone)")

    yield ProjectServices(str(running["base_url"]), check_project)


def _check_base_model(settings: Settings, running: Mapping[str, Any]) -> None:
    wanted, used = settings.base_model, running.get("base_model")
    if wanted and used and wanted != used and Path(wanted).expanduser().resolve() != Path(used).expanduser().resolve():
        raise CliError(
            f"project {settings.project} runs with the base model {used} (pid {running['pid']}), not with {wanted}: "
            "leave --base-model (in Python base_model=) out to use the running project, or stop it first with "
            f"`ratchet down --project {settings.project}`"
        )


def run_detached(settings: Settings, arguments: Sequence[str]) -> dict[str, Any]:
    """Start `ratchet up` in the background with the same arguments; return its run state once it is ready.

    Until then its notes and the states of its services are repeated on stderr. Raises CliError with the end of its log
    if it ends before that.
    """
    state = settings.state
    if running_supervisor(state) is not None:
        raise already_running(state)
    state.make(min_free_disk_mb=settings.min_free_disk_mb)
    signals.install_handlers()
    log = state.log("up")
    with log.open("wb") as output:
        background = subprocess.Popen(
            [sys.executable, "-P", "-m", "ratchet", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ,
            start_new_session=True,
        )
    shown = 0
    try:
        while (found := read_run_state(state)).get("pid") != background.pid or not found.get("ready"):
            ended = background.poll() is not None
            shown = _show_progress(log, shown)
            if ended:
                message = log.read_text(errors="replace").strip().rpartition("ratchet: ")[2]
                raise CliError(message or f"`ratchet up` ended without a message; its log is {log}")
            time.sleep(_POLL)
        _show_progress(log, shown)
    except BaseException:
        background.terminate()
        try:
            background.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            background.kill()
            background.wait()
        raise
    background.returncode = 0  # it outlives this process: without this, Popen warns that nobody waited for it
    return found


def _show_progress(log: Path, shown: int) -> int:
    """Repeat the lines of the log of `up` on stderr, without the first `shown`; return how many are shown now.

    The lines end at its error or its addresses, which the caller shows.
    """
    lines = log.read_text(errors="replace").split("\n")[:-1]  # whole ones
    progress = list(takewhile(lambda line: not line.startswith(("ratchet: ", "base_url: ")), lines))
    for line in progress[shown:]:
        print(line, file=sys.stderr, flush=True)
    return len(progress)


def down(settings: Settings) -> list[str]:
    """Stop everything that the project's pid files name; return what was stopped.

    If the state folder was deleted meanwhile, the `up` that the second pid file names is stopped with its services.
    """
    state = settings.state
    orphan = orphaned_pid(state)
    pids = {name: process.pid for name in SERVICES if (process := pidfile.running(state.pid(name)))}
    supervisor = pidfile.stop_supervisor(state, within=_STOP_TIMEOUT)
    pidfile.stop_leftover_processes(state)
    if orphan is not None:
        return [f"up (pid {orphan}) with its services, whose state folder {state.root} was deleted while they ran"]
    return ([f"up (pid {supervisor})"] if supervisor else []) + [f"{name} (pid {pid})" for name, pid in pids.items()]


def read_run_state(state: StateFolder) -> dict[str, Any]:
    """Return what `up` recorded in running.json; empty if nothing runs, even if a killed `up` left its file."""
    process = pidfile.running(state.pid("up"))
    content = _running_json(state) if process is not None else {}
    return content if process is not None and content.get("pid") == process.pid else {}


def last_proxy_url(state: StateFolder) -> str | None:
    """Return the URL of this project's proxy in its current or last run; None if it never ran."""
    return _running_json(state).get("proxy_url")


def _running_json(state: StateFolder) -> dict[str, Any]:
    try:
        content = json.loads(state.running.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class StartupDisplay:
    """Prints the supervisor's events as lines on stderr; on a terminal also what starts, while services start."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._starting: list[str] = []
        self._spinner = self._console.status("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")  # for lines of a process that runs for days
        name, after = event.service, f"after {event.seconds:.1f} s"
        lines = {
            "note": event.text,
            "starting": f"{name}: starting",
            "ready": f"{name}: ready {after}",
            "exited": f"{now} {event.text}",
            "recovered": f"{now} {name}: ready again {after}",
            "stopping": "stopping ...",
            "stopped": f"{name}: stopped {after}",
        }
        if event.kind in lines:
            self._console.print(lines[event.kind], soft_wrap=True, markup=False)
        if event.kind == "starting":
            self._starting.append(name)
            self._spinner.start()
        elif event.kind == "ready":
            self._starting.remove(name)
        elif event.kind in ("all_ready", "stopping"):
            self._spinner.stop()
        self._spinner.update(f"starting {', '.join(self._starting)}")


# `ratchet reload`: the agents of a changed ratchet.yaml join and leave a project that is up. The services watch the
# resolved settings (`settings/agents_watch.py`). Everything is checked before they are written: settings, judges, and
# the base model that the agents' versions belong to.


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did: agents that joined, left and changed, and the keys that wait for a restart."""

    joined: tuple[str, ...]
    left: tuple[str, ...]
    changed: tuple[str, ...]
    need_restart: tuple[str, ...]

    def lines(self) -> list[str]:
        parts = [("joined", self.joined), ("left", self.left), ("changed", self.changed)]
        found = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        text = [f"agents: {found}; proxy and trainer follow within seconds" if found else "agents: none changed"]
        if self.need_restart:
            text.append(f"not applied before a restart (`ratchet down`, `ratchet up`): {', '.join(self.need_restart)}")
        return text


def reload_agents(new: Settings, note: Callable[[str], None]) -> Reloaded:
    """Let the agents of `new` join and leave the project that is up.

    Raises CliError if the project is not up, and SettingsError if the agents cannot be used;
    nothing has changed then.
    """
    state = new.state
    if not (run := read_run_state(state)).get("ready"):
        raise CliError(f"project {new.project} is not up: `ratchet up` starts it with the settings as they are")
    if not new.agents and not new.is_set("model"):
        raise CliError("no agents are set: name them under `agents` in ratchet.yaml, or the one agent by `model`")
    running = load(state.resolved, environ=services.environment_without_settings())  # the file holds them
    after = with_agents_of(running, new)
    joined, left, changed = changed_agents(running, after)
    need_restart = _not_applied(new, running)
    if affected := [name for name in (*joined, *changed) if after.agents_by_name[name].has_judge]:
        _check_judges(after, affected)
        if "trainer" not in run["services"]:
            need_restart.append("the trainer's process, which no agent needed when the project was started")
    _register(after, joined, next(iter(running.agents_by_name)), new.store_url, note)
    services.write_resolved_settings(after, state.resolved)
    return Reloaded(tuple(joined), tuple(left), tuple(changed), tuple(need_restart))


def _check_judges(settings: Settings, names: list[str]) -> None:
    """Raise SettingsError if the trainer could not create the judge of one of these agents."""
    if settings.agents:
        settings = settings.model_copy(update={"agents": {name: settings.agents[name] for name in names}})
    preflight_checks.check_judges(settings, services.service_environment(settings))


def _register(settings: Settings, joined: list[str], known: str, store_url: str, note: Callable[[str], None]) -> None:
    """Register version 0 of the agents that join: the base model, as the `known` agent's. Raises CliError."""
    with open_store(store_url, create=False) as store:
        served_name = store.policies.get(known, BASE_VERSION).served_name
        for name in joined:
            store.policies.register_base(name, served_name)
        preflight_checks.check_base_model(settings, store, note, serves=True)


def _not_applied(new: Settings, running: Settings) -> list[str]:
    """Return the keys that the user set otherwise than the project runs with. `up` chose those that are not set."""
    running_values, new_values = running.model_dump(mode="json"), new.model_dump(mode="json")
    differ = []
    for path, source in new._sources.items():
        if path[0] in ("agents", "model") or source.startswith("-"):
            continue
        have, want = _at(running_values, path), _at(new_values, path)
        if have != want and MASK not in str(have):
            differ.append(".".join(path))
    return sorted(differ)


def _at(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content
