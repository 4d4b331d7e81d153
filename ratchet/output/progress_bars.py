"""Progress bars on stderr; lines where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINE_EVERY = 10.0  # seconds


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show bars on stderr while the block works; the value is told of (what, done now, in all).

    Off the terminal, what takes longer is told every `_LINE_EVERY` seconds.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield Lines()
        return
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.advance(tasks[what], done)

        yield told


class Lines:
    """Tells now and then how far a work is, where no bar can move."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: dict[str, int] = {}
        self._told = self._began = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take in that so many more are done."""
        so_far = self._done[what] = self._done.get(what, 0) + done
        now = self._clock()
        if now - self._told >= _LINE_EVERY and 0 < so_far < total:
            self._told = now
            left = (now - self._began) / so_far * (total - so_far)
            print(f"{what} {so_far:,} of {total:,}, {left:.0f} s left", file=sys.stderr, flush=True)
