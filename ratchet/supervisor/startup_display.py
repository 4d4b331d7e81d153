"""What the user sees while something takes long: moving bars on a terminal; elsewhere one line per event of a room."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ratchet.supervisor.events import Event


class StartupDisplay:
    """Call it with each event; use it as a context so that the cursor comes back."""

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
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        moving = not self._progress.disable
        if event.kind == "note":
            self._console.print(event.text, soft_wrap=True, markup=False)
        elif event.kind == "starting":
            self._tasks[event.room] = self._progress.add_task(event.room, total=None, state="starting")
            if not moving:
                self._say(f"{event.room}: starting")
        elif event.kind == "ready":
            self._progress.update(self._tasks[event.room], total=1, completed=1, state="ready")
            if not moving:
                self._say(f"{event.room}: ready after {event.seconds:.1f} s")
        elif event.kind == "all_ready":
            self._progress.stop()
        elif event.kind == "died":
            self._say(f"{_now()} {event.text}")
        elif event.kind == "back":
            self._say(f"{_now()} {event.room}: ready again after {event.seconds:.1f} s")
        elif event.kind == "stopping":
            self._progress.stop()
            self._say("stopping ...")
        elif event.kind == "stopped":
            self._say(f"{event.room}: stopped after {event.seconds:.1f} s")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


def _now() -> str:
    """Return the time as a line of what runs for days needs it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
