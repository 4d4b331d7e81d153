"""The rooms of a project for one command: those that run already, or its own, which end with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ratchet.errors import CliError
from ratchet.settings import Settings
from ratchet.supervisor import signals
from ratchet.supervisor.project_lock import ProjectLock
from ratchet.supervisor.startup_display import StartupDisplay
from ratchet.supervisor.supervisor import Supervisor
from ratchet.supervisor.up import describe_vllm_start, read_run_state


@dataclass(frozen=True, slots=True)
class Rooms:
    """Where agents call, and what raises as soon as the rooms have ended."""

    base_url: str
    check: Callable[[], None]


@contextmanager
def started(
    settings: Settings, lock: ProjectLock | None = None, say: Callable[[str], None] = print
) -> Iterator[Supervisor]:
    """Start the rooms; they stop with the block, however it ends. Raises what `Supervisor.start` does."""
    signals.install()
    with StartupDisplay() as show:
        supervisor = Supervisor(settings, show, lock)
        try:
            supervisor.prepare()
            say(describe_vllm_start(settings))
            supervisor.start()
            yield supervisor
        finally:
            supervisor.stop()


@contextmanager
def attached(settings: Settings, say: Callable[[str], None] = print) -> Iterator[Rooms]:
    """Use the rooms that the project runs, else start them for the block."""
    running = read_run_state(settings.state)
    if not running:
        with started(settings, say=say) as supervisor:
            yield Rooms(supervisor.plan.base_url, supervisor.check)
        return

    if not running.get("ready"):
        raise CliError(f"project {settings.project} is still starting (pid {running['pid']}): wait until it is ready")

    def check() -> None:
        if read_run_state(settings.state).get("pid") != running["pid"]:
            raise CliError(f"project {settings.project} has been stopped (pid {running['pid']} runs no more)")

    yield Rooms(str(running["base_url"]), check)
