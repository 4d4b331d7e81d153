"""The heartbeat of this proxy instance in the store: its live versions, its pins, and how far it has shipped.

Sent about once a second, and at once after a live version has changed. All fields are read at one moment.

`on_older_store` is called when the store may have lost rows that it had: it lacks the latest heartbeat, or PostgreSQL's
server was restarted or another one took over. It is called as well when the store begins not to answer, for calls until
it answers again: a standby that takes over may lack the last commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.telemetry.outage_warnings import OutageWarnings, watch_store_use
from ratchet.store.errors import StoreError
from ratchet.store.operation_records import ProxyInstance
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
        instance_id: str,
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
        self._instance_id = instance_id
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
        outage, previous = OutageWarnings(log, "heartbeat_failed", self._on_older_store), 0.0
        server: datetime | None = None
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
                    started_at = await self._call(self._store.proxy_instances.server_started_at)
                    known = await self._call(partial(self._store.proxy_instances.heartbeat, instance, previous))
                if previous and not known:
                    self._report_older("it lacks the latest heartbeat")
                elif previous and started_at != server:
                    self._report_older("its server was restarted or replaced, and may lack its last commits")
                previous, server = now, started_at
                self._metrics.store.report("writing", ok=True)
                outage.end()
            except Exception as error:  # noqa: BLE001 -- the next heartbeat has the whole state again
                self._metrics.store.report("writing", ok=False)
                outage.warn(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._live_versions_changed.wait(), self._interval_seconds)

    def _report_older(self, reason: str) -> None:
        log.warning("event=store_is_older reason=%r", f"{reason}: messages are stored again")
        self._on_older_store()

    async def _call(self, verb: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
