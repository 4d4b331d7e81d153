"""`ratchet up` and `ratchet down`: the rooms of a project, in the foreground or behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ratchet.errors import CliError
from ratchet.settings import Settings
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile, signals, user_pidfile
from ratchet.supervisor.leftover_processes import stop_leftover_processes, stop_supervisor
from ratchet.supervisor.project_lock import already_running
from ratchet.supervisor.startup_display import StartupDisplay
from ratchet.supervisor.supervisor import Supervisor

_SUPERVISOR_TIME = 20.0  # seconds for an `up` to stop its rooms
_POLL = 0.1


def run(settings: Settings) -> None:
    """Start the rooms and hold them until Ctrl-C, SIGTERM, or the death of one."""
    signals.install()
    with StartupDisplay() as show:
        supervisor = Supervisor(settings, show)
        try:
            plan = supervisor.prepare()
            print(describe_vllm_start(settings), flush=True)
            supervisor.start()
            print(f"base_url: {plan.base_url}   model: {settings.model}   (Ctrl-C stops everything)", flush=True)
            if plan.console:
                print(f"console: {plan.console}", flush=True)
            supervisor.watch()
        finally:
            supervisor.stop()


def describe_vllm_start(settings: Settings) -> str:
    """Return what is said of vLLM when it is started: its command is long, and stands at the head of its log."""
    return f"vLLM: starting {settings.base_model}; its command stands in {settings.state.log('vllm')}"


def run_detached(settings: Settings, arguments: Sequence[str]) -> dict[str, Any]:
    """Start `ratchet up` behind the terminal with the same arguments; return what runs once all is ready.

    Raises what ended it, with the end of its log.
    """
    state = settings.state
    if user_pidfile.running(state) is not None:
        raise already_running(state)
    state.make(min_free_disk_mb=settings.min_free_disk_mb)
    signals.install()
    log = state.log("up")
    with log.open("wb") as output:
        behind = subprocess.Popen(
            [sys.executable, "-m", "ratchet", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ,
            start_new_session=True,
        )
    with StartupDisplay():
        try:
            while not _is_ready(found := read_run_state(state), behind.pid):
                if behind.poll() is not None:
                    said = log.read_text(errors="replace").strip()
                    raise CliError(said.rpartition("ratchet: ")[2] or f"it ended without a word; its log is {log}")
                time.sleep(_POLL)
        except BaseException:
            behind.terminate()
            _wait_or_kill(behind)
            raise
    # It outlives this process: nobody waits for it here.
    behind.returncode = 0
    return found


def _is_ready(running: dict[str, Any], pid: int) -> bool:
    """Return whether what runs is what was just started, and ready."""
    return running.get("pid") == pid and bool(running.get("ready"))


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_SUPERVISOR_TIME)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def down(settings: Settings) -> list[str]:
    """End everything that the project's pid files name; return what was ended.

    Where the state folder was deleted meanwhile, the `up` that is known outside of it is ended, with all its rooms.
    """
    state = settings.state
    lost = user_pidfile.orphaned_pid(state)
    rooms = [name for name in ("vllm", "proxy", "trainer") if pidfile.running(state.pid(name))]
    pids = {name: birth.pid for name in rooms if (birth := pidfile.read(state.pid(name)))}
    supervisor = stop_supervisor(state, within=_SUPERVISOR_TIME)
    stop_leftover_processes(state)
    ended = [f"{name} (pid {pid})" for name, pid in pids.items()]
    if lost is not None:
        return [f"up (pid {lost}) with its rooms, whose state folder {state.root} was deleted while they ran"]
    return ([f"up (pid {supervisor})"] if supervisor else []) + ended


def read_run_state(state: StateFolder) -> dict[str, Any]:
    """Return what `up` wrote about what it started; empty where nothing runs, also if a killed `up` left its file."""
    process = pidfile.running(state.pid("up"))
    if process is None:
        return {}
    try:
        content = json.loads(state.running.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("pid") == process.pid else {}


def last_proxy_url(state: StateFolder) -> str | None:
    """Return where this project's own proxy runs, or ran last; None where it never did."""
    try:
        content = json.loads(state.running.read_text())
    except (OSError, ValueError):
        return None
    return content.get("proxy_url") if isinstance(content, dict) else None
