"""Progress of long phases: items done of a total, seconds per item, time left, and running means.

The same numbers go to every watcher: bars on a terminal and in a notebook, log lines elsewhere, Prometheus, and the
store. Watching costs little: bars, lines and writes are limited in time, not by item. Threads may add items
concurrently.
"""

from __future__ import annotations

import datetime
import logging
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ratchet.store.errors import StoreError
from ratchet.store.operation_records import JobProgress
from ratchet.store.store import Store

log = logging.getLogger(__name__)

GATHERING = "gathering"  # groups with a learning signal, towards the next round
JUDGING = "judging"  # groups given to a judge
TRAINING = "training"  # rows of a round

_LINE_INTERVAL = 10.0  # seconds between two lines of a phase
_BAR_INTERVAL = 0.2  # seconds between two updates of a bar in a notebook
_BAR_WIDTH = 30  # characters
_WRITE_INTERVAL = 3.0  # seconds between two writes of a phase to the store


def format_log_line(progress: JobProgress) -> str:
    parts = [f"phase={progress.phase}", f"done={progress.done:g}", f"total={progress.total:g}"]
    if progress.seconds_per_item is not None and progress.eta_seconds is not None:
        parts += [f"seconds_per_item={progress.seconds_per_item:.3g}", f"eta_seconds={progress.eta_seconds:.0f}"]
    return " ".join([*parts, *(f"{name}={value:.4g}" for name, value in progress.means.items())])


def format_sentence(progress: JobProgress) -> str:
    parts = [f"{progress.phase} {progress.done:g} of {progress.total:g}"]
    if progress.seconds_per_item is not None and progress.eta_seconds is not None:
        left = f"{datetime.timedelta(seconds=round(progress.eta_seconds))} left"
        parts += [f"{progress.seconds_per_item:.3g} s each", *([] if progress.ended else [left])]
    return ", ".join([*parts, *(f"{name} {value:.4g}" for name, value in progress.means.items())])


Watcher = Callable[[JobProgress], None]


def _log_progress(progress: JobProgress, alias: str = "") -> None:
    log.info("event=progress %s%s", f"alias={alias} " if alias else "", format_log_line(progress))


class PeriodicLines:
    """Writes a line every `interval` seconds of a phase that takes longer, and one at its end."""

    def __init__(self, interval: float = _LINE_INTERVAL, write: Watcher = _log_progress) -> None:
        self._interval = interval
        self._write = write
        self._written_at: dict[str, float] = {}  # phase -> its seconds at the last line

    def __call__(self, progress: JobProgress) -> None:
        before = self._written_at.get(progress.phase, 0.0)
        if progress.seconds < before:  # the phase began again
            before = 0.0
        due = progress.seconds - before >= self._interval
        if due or (progress.ended and before):
            self._write(progress)
        if progress.ended:
            self._written_at.pop(progress.phase, None)
        elif due:
            self._written_at[progress.phase] = progress.seconds


class PhaseBars:
    """Shows a bar for each running phase on the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[means]}"),
        )
        self._bars = RichProgress(*columns, console=console or _console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __call__(self, progress: JobProgress) -> None:
        with self._lock:
            task = self._tasks.get(progress.phase)
            if task is None:
                self._bars.start()
                task = self._tasks[progress.phase] = self._bars.add_task(progress.phase, total=progress.total, means="")
            means = " ".join(f"{name}={value:.4g}" for name, value in progress.means.items())
            self._bars.update(task, completed=progress.done, total=progress.total, means=means)
            if progress.ended:
                self._bars.remove_task(self._tasks.pop(progress.phase))
                if not self._tasks:
                    self._bars.stop()


class NotebookBars:
    """Shows a bar for each phase below the notebook's cell, and its last numbers once it has ended.

    A display that is updated, and no widget: it needs no extension of the notebook, and threads may update it.
    """

    def __init__(self, interval: float = _BAR_INTERVAL) -> None:
        self._interval = interval
        self._shown: dict[str, tuple[Any, float]] = {}  # phase -> its display, and the phase's seconds at its update
        self._lock = threading.Lock()

    def __call__(self, progress: JobProgress) -> None:
        from IPython.display import display

        with self._lock:
            handle, shown_at = self._shown.get(progress.phase, (None, math.inf))
            if not progress.ended and 0 <= progress.seconds - shown_at < self._interval:
                return  # a phase that begins again has a shorter time than at its last update
            if handle is None:
                handle = display({"text/plain": self._text(progress)}, raw=True, display_id=True)
            else:
                handle.update({"text/plain": self._text(progress)}, raw=True)
            self._shown[progress.phase] = handle, progress.seconds

    @staticmethod
    def _text(progress: JobProgress) -> str:
        done = round(_BAR_WIDTH * min(1.0, progress.done / progress.total)) if progress.total else 0
        bar = "" if progress.ended else f"{'█' * done}{'░' * (_BAR_WIDTH - done)} "
        return bar + format_sentence(progress)


class StoredProgress:
    """Writes the progress of all agents to the store together, at most once per `interval` seconds.

    Watching only takes a note; `flush` writes. A store that does not answer costs nothing but a log line.
    """

    def __init__(
        self, store: Store, interval: float = _WRITE_INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._interval = interval
        self._clock = clock
        self._due_at = 0.0
        self._changed: dict[tuple[str, str], JobProgress] = {}  # by alias and phase; the latest counts
        self._lock = threading.Lock()

    def watch(self, alias: str) -> Watcher:
        """Return the watcher of an agent; it may be called in any thread."""

        def record(progress: JobProgress) -> None:
            row = msgspec.structs.replace(progress, alias=alias, updated_at=time.time())
            with self._lock:
                self._changed[alias, progress.phase] = row

        return record

    @property
    def due_in(self) -> float | None:
        """Seconds until `flush` writes; None if nothing has changed."""
        return max(0.0, self._due_at - self._clock()) if self._changed else None

    def flush(self, *, now: bool = False) -> None:
        """Write what has changed, if that is due; with `now` in any case."""
        if not self._changed or (self._clock() < self._due_at and not now):
            return
        with self._lock:
            changed, self._changed = self._changed, {}
        self._due_at = self._clock() + self._interval
        try:
            self._store.job_progress.update(list(changed.values()))
        except StoreError as error:
            log.warning("event=progress_not_stored reason=%r", str(error))


class Phase:
    """One running phase."""

    def __init__(self, name: str, total: float, notify: Watcher, clock: Callable[[], float]) -> None:
        self.name = name
        self._total = total
        self._notify = notify
        self._clock = clock
        self._started_at = clock()
        self._done = 0.0
        self._sums: dict[str, float] = defaultdict(float)  # of each metric
        self._rows: Counter[str] = Counter()  # that have it
        self._lock = threading.Lock()

    def add(self, items: float = 1, **metrics: float) -> None:
        """Count items as done, with a row of metrics."""
        with self._lock:
            self._done += items
        self.note(**metrics)
        self._notify(self.snapshot())

    def note(self, **metrics: float) -> None:
        """Add a row of metrics to the means without counting an item."""
        with self._lock:
            for metric, value in metrics.items():
                self._sums[metric] += value
                self._rows[metric] += 1

    def at(self, done: float, total: float) -> None:
        """Set what is done and the total; watchers are notified only if one changed."""
        with self._lock:
            changed = (done, total) != (self._done, self._total)
            self._done, self._total = done, total
        if changed:
            self._notify(self.snapshot())

    def end(self) -> None:
        self._notify(self.snapshot(ended=True))

    def snapshot(self, ended: bool = False) -> JobProgress:
        with self._lock:
            seconds = self._clock() - self._started_at
            means = {metric: total / self._rows[metric] for metric, total in self._sums.items()}
            return JobProgress(
                alias="", phase=self.name, done=self._done, total=self._total, seconds=seconds, means=means,
                ended=ended, updated_at=0.0,
            )  # fmt: skip


class Progress:
    """Starts phases and notifies the watchers."""

    def __init__(self, *watchers: Watcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._watchers = watchers
        self._clock = clock
        self._phases: dict[str, Phase] = {}

    def begin(self, name: str, total: float) -> Phase:
        """Begin a phase of `total` items; it replaces a phase of that name that has not ended."""
        phase = self._phases[name] = Phase(name, total, self._notify, self._clock)
        self._notify(phase.snapshot())
        return phase

    def note(self, name: str, **metrics: float) -> None:
        if name in self._phases:
            self._phases[name].note(**metrics)

    def add_pending(self, name: str) -> None:
        """Add one item to the total; the first one begins the phase."""
        phase = self._phases.get(name) or self.begin(name, 0)
        progress = phase.snapshot()
        phase.at(progress.done, progress.total + 1)

    def finish_pending(self, name: str) -> None:
        """Count one item as done; the last one ends the phase."""
        phase = self._phases[name]
        phase.add()
        progress = phase.snapshot()
        if progress.done >= progress.total:
            del self._phases[name]
            phase.end()

    def _notify(self, progress: JobProgress) -> None:
        for watcher in self._watchers:
            watcher(progress)


_console = Console(stderr=True, highlight=False, soft_wrap=True, force_jupyter=False)


def watch_for_service(alias: str) -> Watcher:
    """Return bars if stderr is a terminal, log lines otherwise; both name the agent. All agents share the terminal."""
    if not sys.stderr.isatty():
        return PeriodicLines(write=partial(_log_progress, alias=alias))
    bars = _service_bars()
    return lambda progress: bars(msgspec.structs.replace(progress, phase=f"{alias} {progress.phase}"))


@cache
def _service_bars() -> PhaseBars:
    return PhaseBars()


def watch_for_command() -> Watcher:
    """Return bars on a terminal and in a notebook, sentences on stderr otherwise; for callers that have no log."""
    if Console().is_jupyter:
        return NotebookBars()
    if sys.stderr.isatty():
        return PhaseBars()
    return PeriodicLines(write=lambda progress: print_line(format_sentence(progress)))


def print_line(text: str) -> None:
    _console.print(text, markup=False, emoji=False)
