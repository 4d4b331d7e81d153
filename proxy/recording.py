"""Builds what records calls: from a call to the store."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ratchet.proxy.coordinator.conversations.conversation_cache import ConversationCache
from ratchet.proxy.coordinator.shipping.left_journals import LeftJournals
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.shipping.store_writer import InProcessWriter, StoreWriter
from ratchet.proxy.coordinator.shipping.unwritten_records import UnwrittenRecords
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.redaction.patterns import RedactionPatterns
from ratchet.proxy.redaction.redactor import Redactor
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.call.recorder import Recorder
from ratchet.store.store import Store


class Recording(NamedTuple):
    """From a call to the store: journal, recorder, shipper, and the caches that follow them."""

    unwritten: UnwrittenRecords
    journal: Journal
    redactor: Redactor | None
    recorder: Recorder
    shipper: Shipper
    lookups: RecordLookups
    conversations: ConversationCache


def build_recording(
    settings: ProxySettings,
    store: Store,
    store_writer: StoreWriter | None,
    metrics: ProxyMetrics,
    critical_tasks: CriticalTasks,
) -> Recording:
    """Build what records calls and ships the records to the store."""
    alarm_queue = AlarmQueue()
    journal = Journal(
        settings.journal,
        settings.max_journal_bytes,
        settings.journal_segment_bytes,
        metrics,
        alarm_queue,
        critical_tasks,
    )
    redactor = Redactor(RedactionPatterns(settings.redact, settings.redact_patterns)) if settings.redacts else None
    recorder = Recorder(journal, metrics, strict=settings.capture == "strict", redactor=redactor)
    shipper = Shipper(
        journal,
        store,
        store_writer or InProcessWriter(store),
        metrics,
        alarm_queue,
        recorder.forget_durable_messages,
        lambda: conversations.invalidate_all(),
        critical_tasks,
    )
    lookups = RecordLookups(store, shipper)
    conversations = ConversationCache(store, lookups)
    unwritten = UnwrittenRecords(journal, shipper, store, alarm_queue)
    return Recording(unwritten, journal, redactor, recorder, shipper, lookups, conversations)


def left_journals(
    settings: ProxySettings, folder: Path, store: Store, workers: Collection[str], critical_tasks: CriticalTasks
) -> LeftJournals:
    """Return what ships the journals in a folder of workers that do not exist any more; `workers` are those that do."""

    def make(folder: Path) -> tuple[Journal, Shipper]:
        own = settings.model_copy(update={"journal": folder})
        recording = build_recording(own, store, None, ProxyMetrics(), critical_tasks)
        return recording.journal, recording.shipper

    return LeftJournals(folder, workers, make)
