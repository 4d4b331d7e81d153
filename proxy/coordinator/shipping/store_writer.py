"""Carries a piece of the journal into the store: reads records, writes them, says what was done.

Promises: carrying a piece twice changes nothing (the store goes by call id); an exception means that it has to be
carried again. A record that the store refuses for good goes to `dead-letters.jsonl` beside the journal, with the
reason, and the rest goes on. Remembers nothing between two pieces: where the journal stands is `shipper.py`'s.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ratchet.proxy.coordinator.tool_checks.checker import ToolCallChecker, ToolCallCount
from ratchet.proxy.journal.segments import read_segment
from ratchet.store.errors import SchemaMismatch, StoreUnavailable
from ratchet.store.records import CallEnded, CallStarted, Feedback, Shipment
from ratchet.store.store import Store

DEAD_LETTERS = "dead-letters.jsonl"
_BATCH_BYTES = 4 * 2**20


class SegmentRange(msgspec.Struct, frozen=True):
    """A segment from `offset` on, never past `until`; how much of it is carried at once is the store_writer's
    choice."""

    path: str
    offset: int
    until: int | None


class DeadLetter(msgspec.Struct, frozen=True):
    """A record that the store refuses."""

    call_id: str
    reason: str


class Carried(msgspec.Struct, frozen=True):
    """What was carried: up to which offset, what stands there (`segments.Reading.end`), and whose records."""

    records: int
    offset: int
    end: str
    started: tuple[str, ...] = ()  # calls whose beginning was among them
    ended: tuple[str, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    tools: tuple[ToolCallCount, ...] = ()  # what became known of tool calls


class StoreWriter(Protocol):
    """Something that carries: here, or in a process of its own."""

    def start(self) -> None:
        """Make ready."""

    def carry(self, piece: SegmentRange) -> Carried:
        """Carry a piece, or its beginning. Raises StoreError, OSError; then it has to be carried again."""

    def close(self) -> None:
        """End; a piece under way may fail."""


class InProcessWriter:
    """Carries in the thread that asks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checks = ToolCallChecker(store)

    def start(self) -> None:
        """Nothing to make ready."""

    def close(self) -> None:
        """Nothing to end."""

    def carry(self, piece: SegmentRange) -> Carried:
        """Carry about a batch of records. Raises StoreError, OSError."""
        path = Path(piece.path)
        reading = read_segment(path, piece.offset, _BATCH_BYTES, piece.until)
        records = _without_ended_beginnings(reading.records)
        dead = self._ship(records, path.parent / DEAD_LETTERS) if records else []
        return Carried(
            records=len(reading.records),
            offset=reading.offset,
            end=reading.end,
            started=tuple(record.call_id for record in reading.records if isinstance(record, CallStarted)),
            ended=tuple(record.start.call_id for record in reading.records if isinstance(record, CallEnded)),
            dead=tuple(dead),
            tools=tuple(self._checks.check([one for one in records if not isinstance(one, Feedback)])),
        )

    def _ship(self, records: Sequence[Shipment], dead_letters: Path) -> list[DeadLetter]:
        try:
            self._store.calls.ship(records)
        except (StoreUnavailable, SchemaMismatch):
            raise
        except Exception:  # noqa: BLE001 -- one bad record must not stop the others, whatever is wrong with it
            self._store.policies.live()  # raises where the store is what is wrong
            return self._ship_one_by_one(records, dead_letters)
        return []

    def _ship_one_by_one(self, records: Sequence[Shipment], dead_letters: Path) -> list[DeadLetter]:
        dead = []
        for record in records:
            try:
                self._store.calls.ship([record])
            except (StoreUnavailable, SchemaMismatch):
                raise
            except Exception as error:  # noqa: BLE001 -- as above; the record and the reason are kept
                dead.append(_put_aside(record, error, dead_letters))
        return dead


def _put_aside(record: Shipment, error: Exception, dead_letters: Path) -> DeadLetter:
    letter = DeadLetter(_name(record), f"{type(error).__name__}: {error}"[:2000])
    line = {
        "at": time.time(),
        "call": letter.call_id,
        "reason": letter.reason,
        "record": base64.b64encode(msgspec.msgpack.encode(record)).decode(),
    }
    with dead_letters.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
    return letter


def _without_ended_beginnings(records: Sequence[Shipment]) -> list[Shipment]:
    """Leave out beginnings whose end is here too: the end repeats them."""
    ended = {record.start.call_id for record in records if isinstance(record, CallEnded)}
    return [record for record in records if not isinstance(record, CallStarted) or record.call_id not in ended]


def _name(record: Shipment) -> str:
    """Return the id of a call, or of feedback."""
    if isinstance(record, Feedback):
        return record.id
    return record.start.call_id if isinstance(record, CallEnded) else record.call_id
