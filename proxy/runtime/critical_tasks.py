"""Background tasks and threads that must run as long as the proxy serves.

Promise: if one ends with an error, or is cancelled by anything but `stop_tasks`, the log names it and the reason,
`/health/live` answers 503, and the process exits with a non-zero status soon after. A proxy without its journal
writer or its policy cache must be restarted, not continue to run partially.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

log = logging.getLogger("ratchet.proxy")


class CriticalTasks:
    """The tasks and threads of one proxy. `on_failure` is called once, in the thread of the first failure."""

    def __init__(self) -> None:
        self.failure: str | None = None  # the name of the first task that died, with the reason
        self.on_failure: Callable[[], None] = lambda: None
        self._stopping: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()

    def start_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task; it may end by returning or through `stop_tasks`."""
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(partial(self._on_task_done, name))
        return task

    async def stop_tasks(self, *tasks: asyncio.Task[None]) -> None:
        """Cancel tasks and wait for them."""
        running = [task for task in tasks if not task.done()]
        self._stopping.update(running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._stopping.difference_update(running)

    def make_thread(self, function: Callable[[], None], name: str) -> threading.Thread:
        """Return a thread, not started yet; it ends when `function` returns."""
        return threading.Thread(target=self._run, args=(function, name), name=name, daemon=True)

    def on_task_died(self, name: str, error: BaseException) -> None:
        """Record that a task died. Only the first one is the failure: others may die because of it."""
        reason = f"its task {name!r} died: {type(error).__name__}: {error}"
        log.critical("event=task_died task=%s reason=%r", name, reason, exc_info=error)
        with self._lock:
            first, self.failure = self.failure is None, self.failure or reason
        if first:
            self.on_failure()

    def _run(self, function: Callable[[], None], name: str) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 -- any failure ends the thread
            self.on_task_died(name, error)

    def _on_task_done(self, name: str, task: asyncio.Task[None]) -> None:
        if task in self._stopping:
            return
        error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            self.on_task_died(name, error)
