"""The heartbeat of this proxy instance in the store: its live versions, its pins, and how far it has shipped.

Sent about once a second, and at once after a live version has changed. All fields are read at one moment. A store that
lacks the latest heartbeat lost rows, or is another one: `on_older_store` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.telemetry.outage_warnings import OutageWarnings, watch_store_use
from ratchet.store.errors import StoreError
from ratchet.store.ids import new_id
from ratchet.store.records import ProxyInstance
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_CLOSE_SECONDS = 2.0


class Heartbeat:
    """The service.

    `count_pins` returns the number of trajectories that pin each version at a given time. `shipped_until` returns the
    time before which every record is in the store.
    """

    def __init__(
        self,
        store: Store,
        metrics: ProxyMetrics,
        url: str,
        live_versions: Callable[[], Mapping[str, int]],
        live_versions_changed: asyncio.Event,
        count_pins: Callable[[float], dict[str, int]],
        shipped_until: Callable[[float], float],
        on_older_store: Callable[[], None],
        critical_tasks: CriticalTasks | None = None,
        interval_seconds: float = 1.0,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._instance_id = new_id("proxy")
        self._url = url
        self._live_versions = live_versions
        self._live_versions_changed = live_versions_changed
        self._count_pins = count_pins
        self._shipped_until = shipped_until
        self._on_older_store = on_older_store
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "heartbeat")

    async def start(self) -> None:
        """Start the task."""
        self._task = self._critical_tasks.start_task(self._run(), "heartbeat")

    async def stop(self) -> None:
        """End the task and remove this instance from the store."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        try:
            removal = self._call(partial(self._store.proxy_instances.remove, self._instance_id))
            await asyncio.wait_for(removal, _CLOSE_SECONDS)
        except (StoreError, TimeoutError) as error:
            log.warning("event=instance_not_removed reason=%r", str(error) or "the store does not answer")
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        outage, previous = OutageWarnings(log, "heartbeat_failed"), 0.0
        while True:
            self._live_versions_changed.clear()
            now = time.time()
            instance = ProxyInstance(
                id=self._instance_id,
                url=self._url,
                live_versions=dict(self._live_versions()),
                pinned_trajectories=self._count_pins(now),
                shipped_until=self._shipped_until(now),
                heartbeat_at=now,
            )
            try:
                with watch_store_use(self._metrics.store, "writing", outage):
                    known = await self._call(partial(self._store.proxy_instances.heartbeat, instance, previous))
                if previous and not known:
                    log.warning(
                        "event=store_is_older reason='it lacks the latest heartbeat: messages are stored again'"
                    )
                    self._on_older_store()
                previous = now
                self._metrics.store.report("writing", ok=True)
                outage.end()
            except Exception as error:  # noqa: BLE001 -- the next heartbeat has the whole state again
                self._metrics.store.report("writing", ok=False)
                outage.warn(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._live_versions_changed.wait(), self._interval_seconds)

    async def _call(self, verb: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
