"""The parts that must not end while the proxy serves: its background tasks and threads.

Promise: where one ends by an error, or by a hand that is not ours, the log says which and why, `/health/live` answers
503 with the reason, and the process ends with a non-zero status soon after: a proxy without its watch over connections,
its journal's writer or its copy of the policies must be started anew, not go on as half of itself.
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
    """The parts of one proxy. `on_failure` is called once, in whichever thread it happens."""

    def __init__(self) -> None:
        self.failure: str | None = None  # which part died, and why
        self.on_failure: Callable[[], None] = lambda: None
        self._ending: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a part that is a task; it ends by `end`, or by itself once it has done its work."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(partial(self._ended, name))
        return task

    async def stop_tasks(self, *tasks: asyncio.Task[None]) -> None:
        """End parts that are tasks."""
        running = [task for task in tasks if not task.done()]
        self._ending.update(running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._ending.difference_update(running)

    def make_thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """Return a part that is a thread, to be started; it ends when `work` returns."""
        return threading.Thread(target=self._run, args=(work, name), name=name, daemon=True)

    def on_task_died(self, name: str, error: BaseException) -> None:
        """A part ended that must not. The first one counts: others may end because of it."""
        reason = f"its part {name!r} died: {type(error).__name__}: {error}"
        log.critical("event=part_died part=%s reason=%r", name, reason, exc_info=error)
        with self._lock:
            first, self.failure = self.failure is None, self.failure or reason
        if first:
            self.on_failure()

    def _run(self, work: Callable[[], None], name: str) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- a thread ends with it, whatever it is
            self.on_task_died(name, error)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task in self._ending:
            return
        error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            self.on_task_died(name, error)
