"""Ships the journals of workers that do not exist any more, because there are fewer of them now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.journal.segments import segment_numbers

log = logging.getLogger("ratchet.proxy")


class LeftJournals:
    """The service: ships them once, at start; what the store does not take then stays for the next start.

    `folder` holds one folder for each worker; `workers` are those that run. `make` returns a folder's journal and
    shipper.
    """

    def __init__(self, folder: Path, workers: Collection[str], make: Callable[[Path], tuple[Journal, Shipper]]) -> None:
        self._folder = folder
        self._workers = workers
        self._make = make

    async def start(self) -> None:
        """Ship them. Raises ProxyError if one is in use by another proxy."""
        for folder in sorted(self._folder.glob("worker-*")):
            if folder.name in self._workers or not segment_numbers(folder):
                continue
            journal, shipper = self._make(folder)
            await journal.start()
            try:
                await shipper.start()
                log.info("event=left_journal_shipped folder=%s records=%d", folder, shipper.shipped)
                await shipper.stop()
            finally:
                await journal.stop()

    async def stop(self) -> None:
        """Nothing to stop."""
