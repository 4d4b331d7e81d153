"""Records that the journal's disk had not taken when the proxy stopped: written straight to the store, or lost.

Promise: no record is discarded at a stop without an error in the log and, if the store takes it, an alarm.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from ratchet.proxy.coordinator.shipping.shipper import DEAD_LETTER_ALARM, Shipper
from ratchet.proxy.coordinator.shipping.store_writer import DEAD_LETTERS, InProcessWriter
from ratchet.proxy.journal.journal import ALARM, LOSS_ALARM, Journal
from ratchet.proxy.journal.segments import decode_frames
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_TIMEOUT = 10.0  # seconds for the store, which may hang
_BATCH = 500  # records


class UnwrittenRecords:
    """The service. It starts before the journal, so that it stops after it."""

    def __init__(self, journal: Journal, shipper: Shipper, store: Store, alarm_queue: AlarmQueue) -> None:
        self._journal = journal
        self._shipper = shipper
        self._store = store
        self._alarm_queue = alarm_queue
        self._stored = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Write what the journal could not; report what the store does not take either."""
        if not self._journal.unwritten:
            return
        thread = threading.Thread(target=self._run, name="unwritten-records", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _TIMEOUT)
        if thread.is_alive():
            self._report(f"it did not answer within {_TIMEOUT:g} s")

    def _run(self) -> None:
        try:
            reason = self._write()
        except Exception as error:  # noqa: BLE001 -- whatever failed, the records are reported
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            log.info("event=unwritten_records_stored records=%d journal=%s", self._stored, self._journal.folder)
        else:
            self._report(reason)
        self._alarm_queue.clear_alarm(ALARM)  # it says that records wait in memory
        self._alarm_queue.deliver_alarms(self._store)

    def _write(self) -> str | None:
        """Write the records into the store; return why it cannot take them. Raises StoreError, OSError."""
        records = decode_frames(self._journal.unwritten)
        if self._shipper.backlog > len(records):  # a call's end before its beginning: its messages would be left out
            return "it does not have the records before them yet"
        writer, dead_letters = InProcessWriter(self._store), self._journal.folder / DEAD_LETTERS
        while self._stored < len(records):
            batch = records[self._stored : self._stored + _BATCH]
            dead, _ = writer.write_records(batch, dead_letters)
            for letter in dead:
                log.warning("event=record_rejected call=%s reason=%r", letter.call_id, letter.reason)
                reason = f"the store rejected a record of call {letter.call_id}: see {dead_letters}"
                self._alarm_queue.raise_alarm(DEAD_LETTER_ALARM, reason)
            self._stored += len(batch)
        return None

    def _report(self, reason: str) -> None:
        lost = len(self._journal.unwritten) - self._stored
        text = (
            f"{lost} records of the journal {self._journal.folder} are lost: its disk did not take them before the "
            f"proxy stopped, nor did the store: {reason}; answers in them are missing or `interrupted`: make that disk "
            f"writable before this proxy starts again"
        )
        log.error("event=records_lost records=%d reason=%r", lost, text)
        self._alarm_queue.raise_alarm(LOSS_ALARM, text)
