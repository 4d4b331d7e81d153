"""Sends alarms to a webhook, in the form of Slack: `{"text": ...}`. The one place that sends those of every process.

    consumes  the store's alarms: those of proxies, trainers and `ratchet up`
    produces  one message when an alarm is raised, and one when it is cleared
    waits for the webhook; nothing waits for this

Promises: of several proxies on one store, one sends (a lease). What was sent is in the store, so an alarm is sent after
an outage or a restart as well, and at least once: the store's table is the queue, one entry per name. A webhook that
fails is tried again, less and less often. An alarm that comes and goes is sent at most every `_QUIET_SECONDS`, and at
most `_MAX_PER_ROUND` messages are sent at a time. The URL is a secret: it is in no log, no error and no metric.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.errors import StoreError
from ratchet.store.ids import new_id
from ratchet.store.operation_records import Alarm
from ratchet.store.store import Store

if TYPE_CHECKING:
    import httpx
    from pydantic import SecretStr

log = logging.getLogger("ratchet.proxy")

_LEASE = "alarm_webhook"
_LEASE_SECONDS = 60.0
_TIMEOUT_SECONDS = 10.0
_INTERVAL_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 300.0
_QUIET_SECONDS = 600.0
_MAX_PER_ROUND = 20
_MAX_CHARS = 3_000  # of a message; Slack takes 40,000


class AlarmWebhook:
    """The service; without a URL it does nothing."""

    def __init__(
        self, url: SecretStr | None, store: Store, metrics: ProxyMetrics, interval_seconds: float = _INTERVAL_SECONDS
    ) -> None:
        self._url = url
        self._store = store
        self._metrics = metrics
        self._interval = interval_seconds
        self._owner = new_id("alarms")
        self._task: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._http: httpx.Client | None = None

    async def start(self) -> None:
        """Start the task."""
        if self._url is not None:
            import httpx  # takes 4 MB of each process, most of which have no webhook

            self._thread = ThreadPoolExecutor(1, "alarm_webhook")
            self._http = httpx.Client(timeout=_TIMEOUT_SECONDS, follow_redirects=False)
            self._task = asyncio.create_task(self._run(), name="alarm_webhook")

    async def stop(self) -> None:
        """End the task; does not wait for the webhook."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._http is not None:
            self._http.close()

    async def _run(self) -> None:
        pause = self._interval
        while True:
            await asyncio.sleep(pause)
            failure = await asyncio.get_running_loop().run_in_executor(self._thread, self._send_pending)
            pause = self._interval if failure is None else min(2 * pause, _MAX_PAUSE_SECONDS)
            if failure is not None:
                log.warning("event=alarm_webhook_failed reason=%r retry_seconds=%.0f", failure, pause)

    def _send_pending(self) -> str | None:
        """Send what has not been sent; return why that failed, None if it did not."""
        try:
            if not self._store.leases.acquire(_LEASE, self._owner, _LEASE_SECONDS):
                return None
            for alarm in self._store.alarms.unsent(time.time(), _QUIET_SECONDS)[:_MAX_PER_ROUND]:
                failure = self._send(alarm)
                self._metrics.alarm_messages.labels("failed" if failure else "sent").inc()
                if failure is not None:
                    return failure
                self._store.alarms.mark_sent(alarm, time.time())
        except StoreError as error:
            return str(error)
        return None

    def _send(self, alarm: Alarm) -> str | None:
        """Send one alarm; return why the webhook did not take it."""
        if self._url is None or self._http is None:
            return None
        import httpx

        try:
            response = self._http.post(self._url.get_secret_value(), json={"text": message_of(alarm)})
        except (httpx.HTTPError, RuntimeError) as error:  # its text may contain the URL; closed: the proxy stops
            return f"no answer ({type(error).__name__})"
        return None if response.is_success else f"it answered {response.status_code}"


def message_of(alarm: Alarm) -> str:
    """Return the text of an alarm; what Slack takes for markup or mentions is escaped."""
    verb = "cleared" if alarm.cleared_at is not None else "raised"
    text = f"Ratchet alarm {verb}: {alarm.name}\n{alarm.reason}"
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(plain, escaped)
    return text[:_MAX_CHARS]
