"""Progress of long work: done of total, seconds per item, time left, and running means, each with its own divisor.

The same numbers go to whoever watches: a moving bar on a terminal, a log line now and then elsewhere, and Prometheus.
Promises that watching costs next to nothing: bars and lines are bounded in time, not in items. Threads may add at once.
"""

from __future__ import annotations

import datetime
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ratchet.store.coordination.job_progress import ProgressRate

log = logging.getLogger(__name__)

GATHERING = "gathering"  # groups with a learning signal, towards the next round
JUDGING = "judging"  # groups that a judge was given
TRAINING = "training"  # rows of a round that a gradient was taken of

LINE_EVERY = 10.0  # seconds between two lines of one work
_BAR_EVERY = 0.5  # seconds between two pictures of a bar


class RunningMeans:
    """Means of named metrics over what was added so far; each metric counts only the rows that have it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._divisors: Counter[str] = Counter()

    def add(self, row: Mapping[str, float]) -> None:
        """Add one row of metrics."""
        for name, value in row.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._divisors[name] += 1

    def means(self) -> dict[str, float]:
        """Return the mean of each metric seen so far."""
        return {name: total / self._divisors[name] for name, total in self._sums.items()}


@dataclass(frozen=True, slots=True)
class Standing(ProgressRate):
    """How far a work is. `seconds` since it began; `means` by metric."""

    work: str
    done: float
    total: float
    seconds: float
    means: Mapping[str, float]
    ended: bool = False

    def line(self) -> str:
        """Return the standing as keys and values of one log line."""
        parts = [f"work={self.work}", f"done={self.done:g}", f"total={self.total:g}"]
        if self.seconds_per_item is not None and self.eta_seconds is not None:
            parts += [f"seconds_per_item={self.seconds_per_item:.3g}", f"eta_seconds={self.eta_seconds:.0f}"]
        return " ".join([*parts, *(f"{name}={value:.4g}" for name, value in self.means.items())])

    def sentence(self) -> str:
        """Return the standing for people."""
        parts = [f"{self.work} {self.done:g} of {self.total:g}"]
        if self.seconds_per_item is not None and self.eta_seconds is not None:
            left = f"{datetime.timedelta(seconds=round(self.eta_seconds))} left"
            parts += [f"{self.seconds_per_item:.3g} s each", *([] if self.ended else [left])]
        return ", ".join([*parts, *(f"{name} {value:.4g}" for name, value in self.means.items())])


Watcher = Callable[[Standing], None]


def _logged(standing: Standing) -> None:
    log.info("event=progress %s", standing.line())


class Lines:
    """Tells of a work that takes longer than `every` seconds now and then, and once more at its end; in the log."""

    def __init__(self, every: float = LINE_EVERY, tell: Watcher = _logged) -> None:
        self._every = every
        self._tell = tell
        self._told: dict[str, float] = {}  # work -> seconds at its last line

    def __call__(self, standing: Standing) -> None:
        """See a standing."""
        before = self._told.get(standing.work, 0.0)
        if standing.seconds < before:  # the work began anew
            before = 0.0
        due = standing.seconds - before >= self._every
        if due or (standing.ended and before):
            self._tell(standing)
        if standing.ended:
            self._told.pop(standing.work, None)
        elif due:
            self._told[standing.work] = standing.seconds


class Bars:
    """Shows a bar for each work on the terminal."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[Any]] = {}

    def __call__(self, standing: Standing) -> None:
        """See a standing."""
        bar = self._bars.get(standing.work)
        if bar is None:
            bar = tqdm(total=standing.total, desc=standing.work, file=sys.stderr, mininterval=_BAR_EVERY, leave=False)
            self._bars[standing.work] = bar
        bar.total = standing.total
        bar.set_postfix({name: f"{value:.4g}" for name, value in standing.means.items()}, refresh=False)
        bar.update(standing.done - bar.n)
        if standing.ended:
            self._bars.pop(standing.work).close()


class Work:
    """One long work under way."""

    def __init__(self, name: str, total: float, tell: Watcher, clock: Callable[[], float]) -> None:
        self.name = name
        self._total = total
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._done = 0.0
        self._means = RunningMeans()
        self._lock = threading.Lock()

    def add(self, items: float = 1, **metrics: float) -> None:
        """Count items as done, with a row of metrics."""
        with self._lock:
            self._done += items
            if metrics:
                self._means.add(metrics)
        self._tell(self.standing())

    def note(self, **metrics: float) -> None:
        """Take a row of metrics into the means; nothing is done by it."""
        with self._lock:
            self._means.add(metrics)

    def at(self, done: float, total: float) -> None:
        """Say how far it is, where that is known from elsewhere; nothing is told where it has not moved."""
        with self._lock:
            moved = (done, total) != (self._done, self._total)
            self._done, self._total = done, total
        if moved:
            self._tell(self.standing())

    def end(self) -> None:
        """It is over."""
        self._tell(self.standing(ended=True))

    def standing(self, ended: bool = False) -> Standing:
        """Return how far it is."""
        with self._lock:
            return Standing(self.name, self._done, self._total, self._clock() - self._began, self._means.means(), ended)


class Progress:
    """Where works begin, and who watches them."""

    def __init__(self, *watchers: Watcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._watchers = watchers
        self._clock = clock
        self._works: dict[str, Work] = {}

    def begin(self, name: str, total: float) -> Work:
        """Begin a work of so many items; a work of that name that was not ended is forgotten."""
        work = self._works[name] = Work(name, total, self._tell, self._clock)
        self._tell(work.standing())
        return work

    def note(self, name: str, **metrics: float) -> None:
        """Take a row of metrics into the means of a work, where that is under way."""
        if name in self._works:
            self._works[name].note(**metrics)

    def more(self, name: str) -> None:
        """Count one more item to be done; the first one begins the work."""
        work = self._works.get(name) or self.begin(name, 0)
        standing = work.standing()
        work.at(standing.done, standing.total + 1)

    def one_done(self, name: str) -> None:
        """Count one item as done; the last one ends the work."""
        work = self._works[name]
        work.add()
        standing = work.standing()
        if standing.done >= standing.total:
            del self._works[name]
            work.end()

    def _tell(self, standing: Standing) -> None:
        for watcher in self._watchers:
            watcher(standing)


def on_this_terminal() -> Watcher:
    """Return bars where the standard error is a terminal, lines of the log elsewhere."""
    return Bars() if sys.stderr.isatty() else Lines()


def format_for_terminal() -> Watcher:
    """Return bars where the standard error is a terminal, sentences on it elsewhere: a command has no log."""
    return Bars() if sys.stderr.isatty() else Lines(tell=lambda standing: say(standing.sentence()))


def say(text: str) -> None:
    """Print a line on the standard error, above the bars that may stand there."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
