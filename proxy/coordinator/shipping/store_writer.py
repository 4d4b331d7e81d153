"""Writes a range of the journal into the store, and reports what it wrote.

Promises: writing a range twice changes nothing, because the store upserts by call id; after an exception the range must
be written again. A record that the store rejects goes to `dead-letters.jsonl` next to the journal, with the reason; the
others are written. Keeps no state between two ranges: `shipper.py` has the position.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ratchet.proxy.coordinator.tool_checks.checker import ToolCallChecker, ToolCallCount
from ratchet.proxy.journal.segments import SegmentRead, read_frames, read_segment
from ratchet.store.errors import SchemaMismatch, StoreUnavailable
from ratchet.store.ids import is_planned
from ratchet.store.records import CallEnded, CallStarted, Feedback, Shipment
from ratchet.store.store import Store

DEAD_LETTERS = "dead-letters.jsonl"
_BATCH_BYTES = 4 * 2**20


class SegmentRange(msgspec.Struct, frozen=True):
    """A segment from `offset`, up to `until`. The writer decides how much of it to write at once.

    `holds`: beginnings whose end is not in the range are left out. `held`: offsets of those that were left out before,
    by call. They are written with their ends, and those of `due` now.
    """

    path: str
    offset: int
    until: int | None
    holds: bool = False
    held: Mapping[str, int] = {}
    due: frozenset[str] = frozenset()


class HeldBeginning(msgspec.Struct, frozen=True):
    """The beginning of a call that was left out. `place`: how many records of its range are before it."""

    call_id: str
    offset: int
    place: int


class DeadLetter(msgspec.Struct, frozen=True):
    """A record that the store rejected."""

    call_id: str
    reason: str


class WriteResult(msgspec.Struct, frozen=True):
    """What was written of a range."""

    records: int
    offset: int  # where the next range starts
    end: str  # what is at `offset`: see `segments.Reading.end`
    started: tuple[str, ...] = ()  # calls with a start record in the range
    ended: tuple[str, ...] = ()  # calls with an end record in the range
    dead: tuple[DeadLetter, ...] = ()
    tools: tuple[ToolCallCount, ...] = ()  # new outcomes and results of tool calls
    held: tuple[HeldBeginning, ...] = ()


class StoreWriter(Protocol):
    """Writes ranges, in this process or in another one."""

    def start(self) -> None:
        """Start the writer."""

    def write(self, segment: SegmentRange) -> WriteResult:
        """Write a range, or its beginning. Raises StoreError, OSError; then it must be written again."""

    def close(self) -> None:
        """Stop the writer; a write in progress may fail."""


class InProcessWriter:
    """Writes in the caller's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checks = ToolCallChecker(store)

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to stop."""

    def write(self, segment: SegmentRange) -> WriteResult:
        """Write about one batch of records. Raises StoreError, OSError."""
        path = Path(segment.path)
        reading = read_segment(path, segment.offset, _BATCH_BYTES, segment.until)
        ended = {record.start.call_id for record in reading.records if isinstance(record, CallEnded)}
        held = _without_end(reading, ended) if segment.holds else ()
        before = read_frames(path, [at for name, at in segment.held.items() if name in ended or name in segment.due])
        records = _whole([*before, *reading.records], ended, {one.call_id for one in held})
        dead, tools = self.write_records(records, path.parent / DEAD_LETTERS)
        return WriteResult(
            records=len(reading.records),
            offset=reading.offset,
            end=reading.end,
            started=tuple(record.call_id for record in reading.records if isinstance(record, CallStarted)),
            ended=tuple(ended),
            dead=tuple(dead),
            tools=tuple(tools),
            held=held,
        )

    def write_records(
        self, records: Sequence[Shipment], dead_letters: Path
    ) -> tuple[Sequence[DeadLetter], Sequence[ToolCallCount]]:
        """Write records; those that the store rejects go to the file `dead_letters`. Raises StoreError, OSError."""
        dead = self._ship(records, dead_letters) if records else ()
        return dead, self._checks.check([one for one in records if not isinstance(one, Feedback)])

    def _ship(self, records: Sequence[Shipment], dead_letters: Path) -> list[DeadLetter]:
        try:
            self._store.calls.ship(records)
        except (StoreUnavailable, SchemaMismatch):
            raise
        except Exception:  # noqa: BLE001 -- one bad record must not block the others
            self._store.policies.live()  # raises if the store itself fails
            return self._ship_one_by_one(records, dead_letters)
        return []

    def _ship_one_by_one(self, records: Sequence[Shipment], dead_letters: Path) -> list[DeadLetter]:
        dead = []
        for record in records:
            try:
                self._store.calls.ship([record])
            except (StoreUnavailable, SchemaMismatch):
                raise
            except Exception as error:  # noqa: BLE001 -- as above; the record and the reason are stored
                dead.append(_add_dead_letter(record, error, dead_letters))
        return dead


def _whole(records: Sequence[Shipment], ended: Collection[str], left_out: Collection[str]) -> list[Shipment]:
    """Return the records of a range: those of a call that ended as one, with messages and tools of its beginning."""
    started = {one.call_id: one for one in records if isinstance(one, CallStarted) and one.call_id in ended}
    whole: list[Shipment] = []
    for record in records:
        if isinstance(record, CallEnded):
            whole.append(_with_content(record, started.get(record.start.call_id)))
        elif not isinstance(record, CallStarted) or not (record.call_id in ended or record.call_id in left_out):
            whole.append(record)
    return whole


def _with_content(end: CallEnded, started: CallStarted | None) -> CallEnded:
    if started is None or not (started.nodes or started.tools):
        return end
    start = msgspec.structs.replace(end.start, nodes=started.nodes, tools=started.tools)
    return msgspec.structs.replace(end, start=start)


def _add_dead_letter(record: Shipment, error: Exception, dead_letters: Path) -> DeadLetter:
    letter = DeadLetter(_id_of(record), f"{type(error).__name__}: {error}"[:2000])
    line = {
        "at": time.time(),
        "call": letter.call_id,
        "reason": letter.reason,
        "record": base64.b64encode(msgspec.msgpack.encode(record)).decode(),
    }
    with dead_letters.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
    return letter


def _without_end(reading: SegmentRead, ended: Collection[str]) -> tuple[HeldBeginning, ...]:
    """Return the beginnings of calls that have not ended, except those of rollouts, whose trajectories are awaited."""
    return tuple(
        HeldBeginning(record.call_id, offset, place)
        for place, (record, offset) in enumerate(zip(reading.records, reading.offsets, strict=True))
        if isinstance(record, CallStarted) and record.call_id not in ended and not is_planned(record.trajectory_id)
    )


def _id_of(record: Shipment) -> str:
    """Return the id of a call, or of feedback."""
    if isinstance(record, Feedback):
        return record.id
    return record.start.call_id if isinstance(record, CallEnded) else record.call_id
