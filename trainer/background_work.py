"""BackgroundWork: one thing at a time in a thread of its own, so that an agent's controller never waits for it.

Promises: the result is recorded, and an error raised, in the caller's thread, by `collect`; nothing new starts before.
All work runs in one thread, which does not keep the process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def ignore() -> None:
    """Do nothing."""


def no_change(_: object) -> bool:
    return False


class BackgroundWork:
    """The work of one kind of one agent. `on_done` is called in the work's thread whenever some has ended."""

    def __init__(self, name: str, on_done: Callable[[], None] = ignore) -> None:
        self._name = name
        self._on_done = on_done
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work was started that is not collected yet."""
        return self._job is not None

    @property
    def what(self) -> str | None:
        """What runs, for people."""
        return self._job.what if self._job is not None else None

    def start(self, what: str, work: Callable[[], Result], record: Callable[[Result], bool]) -> None:
        """Start `work` in the background; `collect` gives its result to `record`. Nothing else may run."""
        if self._job is not None:
            raise RuntimeError(f"{what} was started before {self.what} was collected")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._job = _Job(what, work, record)
        self._jobs.put(self._job)

    def collect(self) -> bool:
        """Record the result if the work is over, and return what `record` returned; False while it runs.

        Raises what the work or `record` raised.
        """
        job = self._job
        if job is None or not job.over.is_set():
            return False
        self._job = None
        if job.error is not None:
            raise job.error
        return job.record(job.result)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the work is over; return whether it is. Its result is collected by `collect` only."""
        return self._job is None or self._job.over.wait(timeout)

    def close(self) -> None:
        """End the thread after the work that runs; does not wait for it."""
        if self._thread is not None:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.result = job.work()
            except BaseException as error:  # noqa: BLE001  raised again by `collect`
                job.error = error
            job.over.set()
            self._on_done()
            del job


class _Job:
    """Work that was started."""

    def __init__(self, what: str, work: Callable[[], Any], record: Callable[[Any], bool]) -> None:
        self.what = what
        self.work = work
        self.record = record
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = threading.Event()
