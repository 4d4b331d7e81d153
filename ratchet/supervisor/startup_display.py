"""Events of the supervisor, and their display: moving bars on a terminal, else one line per event."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


@dataclass(frozen=True, slots=True)
class Event:
    """What the supervisor does; `seconds` since the start of the service, or of the whole project."""

    kind: Literal["note", "starting", "waiting", "ready", "all_ready", "exited", "recovered", "stopping", "stopped"]
    service: str = ""
    text: str = ""
    seconds: float = 0.0


def discard_event(_: Event) -> None:
    """Ignore an event."""


class StartupDisplay:
    """Call it with each event. A context manager, which restores the cursor."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_bars()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        on_terminal = not self._progress.disable
        if event.kind == "note":
            self._print(event.text)
        elif event.kind == "starting":
            self._tasks[event.service] = self._progress.add_task(event.service, total=None, state="starting")
            if not on_terminal:
                self._print(f"{event.service}: starting")
        elif event.kind == "ready":
            self._progress.update(self._tasks[event.service], total=1, completed=1, state="ready")
            if not on_terminal:
                self._print(f"{event.service}: ready after {event.seconds:.1f} s")
        elif event.kind == "all_ready":
            self._stop_bars()
        elif event.kind == "exited":
            self._print(f"{_now()} {event.text}")
        elif event.kind == "recovered":
            self._print(f"{_now()} {event.service}: ready again after {event.seconds:.1f} s")
        elif event.kind == "stopping":
            self._stop_bars()
            self._print("stopping ...")
        elif event.kind == "stopped":
            self._print(f"{event.service}: stopped after {event.seconds:.1f} s")

    def _stop_bars(self) -> None:
        if not self._progress.disable:  # older releases of rich print an empty line for disabled bars
            self._progress.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


def _now() -> str:
    """Return the time, for lines of a process that runs for days."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
