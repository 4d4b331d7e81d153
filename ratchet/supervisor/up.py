"""`ratchet up` and `ratchet down`: a project's services in the foreground, in the background, or for one command."""

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
from typing import Any

from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.settings.setting_errors import listed
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.supervisor import pidfile, signals
from ratchet.supervisor.leftover_processes import stop_leftover_processes, stop_supervisor
from ratchet.supervisor.project_lock import ProjectLock, already_running, orphaned_pid, running_supervisor
from ratchet.supervisor.startup_display import StartupDisplay
from ratchet.supervisor.supervisor import Supervisor

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
    """Start the services; they stop at the end of the block, however it ends. Raises what `Supervisor.start` does.

    `check` is called while they start, and raises to stop that; None: a signal does, because this process is a command.
    `models_only`: start the proxy alone, for the models of `model_list`.
    """
    if check is None:
        signals.install_handlers()
    with StartupDisplay() as show:
        supervisor = Supervisor(settings, show, lock, check, models_only=models_only)
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
    """Raise CliError if a base model is named that is not the running project's."""
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
        while not _is_ready(found := read_run_state(state), background.pid):
            ended = background.poll() is not None
            shown = _show_progress(log, shown)
            if ended:
                message = log.read_text(errors="replace").strip().rpartition("ratchet: ")[2]
                raise CliError(message or f"`ratchet up` ended without a message; its log is {log}")
            time.sleep(_POLL)
        _show_progress(log, shown)
    except BaseException:
        background.terminate()
        _wait_or_kill(background)
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


def _is_ready(running: dict[str, Any], pid: int) -> bool:
    """Return whether the run state is that of process `pid`, and ready."""
    return running.get("pid") == pid and bool(running.get("ready"))


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def down(settings: Settings) -> list[str]:
    """Stop everything that the project's pid files name; return what was stopped.

    If the state folder was deleted meanwhile, the `up` that the second pid file names is stopped with its services.
    """
    state = settings.state
    orphan = orphaned_pid(state)
    running = [name for name in SERVICES if pidfile.running(state.pid(name))]
    pids = {name: identity.pid for name in running if (identity := pidfile.read(state.pid(name)))}
    supervisor = stop_supervisor(state, within=_STOP_TIMEOUT)
    stop_leftover_processes(state)
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
