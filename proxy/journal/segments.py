"""The journal's file format: framed records in numbered segments.

A frame is the payload's length (u32), its CRC-32 (u32) and the payload (MessagePack of a `store.records.Shipment`). A
segment begins with a magic that names the format. Zeros in place of a frame end the segment: pre-allocated blocks hold
zeros, and no payload is empty. A crash may leave a torn frame at the end of a process's last segment. Reading stops
there and reports it; everything before it is complete.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal.isal_zlib import crc32

from ratchet.store.records import Shipment

MAGIC = b"RATCHET1"
_HEAD = struct.Struct("<II")
_MAX_FRAME_BYTES = 2**30
_CHUNK = 2**20
_USUAL_FRAME_BYTES = 2**14  # most frames are smaller

_PAYLOAD = re.compile(rb"(?s)(?:[\x80-\x8f]|\xde..)\xa4type(?:\xa7started|\xa5ended|\xa8feedback)")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Shipment).decode


class Position(msgspec.Struct, frozen=True):
    """How far the journal has been shipped. `open` lists the calls that began before it and have not ended."""

    segment: int = 0
    offset: int = 0
    open: tuple[str, ...] = ()


def read_position(folder: Path) -> Position:
    """Return how far the folder's journal has been shipped; the start if there is no readable position."""
    try:
        return msgspec.json.decode((folder / "position").read_bytes(), type=Position)
    except (FileNotFoundError, msgspec.DecodeError):
        return Position()


def write_position(folder: Path, position: Position) -> None:
    """Write the position. Not synced: after a power cut some records are shipped again. Raises OSError."""
    temporary = folder / "position.new"
    temporary.write_bytes(msgspec.json.encode(position))
    os.replace(temporary, folder / "position")


def frame(record: Shipment) -> bytes:
    """Return a record as one frame."""
    payload = _encode(record)
    return _HEAD.pack(len(payload), crc32(payload)) + payload


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"{number:012d}.journal"


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in a folder, oldest first."""
    return sorted(int(path.stem) for path in folder.glob("*.journal") if path.stem.isdigit())


def write_all(file: int, data: bytes, at: int) -> None:
    """Write bytes at offset `at`. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it are durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def records_end(path: Path) -> int:
    """Return where a segment's records end and its pre-allocated zeros begin. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _HEAD.size))
        if any(file.read()):  # no zeros, or so few that they may belong to a record
            return size
        at = len(MAGIC)
        while at < size:
            file.seek(at)
            head = file.read(_HEAD.size)
            if not any(head):
                return at
            at += _length(head)
    return size


@dataclass(slots=True, frozen=True)
class SegmentRead:
    """The result of reading a segment: records, the offset after the last one, and what follows there.

    `end`: "more" (more records may follow), "end" (only zeros follow), "torn" (an incomplete frame, as a crash leaves
    it, followed only by zeros), "damaged" (a complete frame with a wrong checksum, or bytes that are no frame).
    """

    records: list[Shipment]
    offset: int
    end: str
    offsets: list[int]  # of the records' frames


def read_segment(path: Path, offset: int, max_bytes: int, until: int | None = None) -> SegmentRead:
    """Read records from `offset`, about `max_bytes` of them. Raises OSError.

    `until` is where the records end, if known: nothing after it is read, and zeros before it are damage.
    """
    with path.open("rb") as file:
        if offset == 0:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                return SegmentRead([], 0, "torn" if MAGIC.startswith(magic) else "damaged", [])
            offset = len(MAGIC)
        file.seek(offset)
        remaining = None if until is None else max(0, until - offset)
        data = file.read(max_bytes if remaining is None else min(max_bytes, remaining))
        records, offsets, used, end = _frames(data)
        if end == "torn" and not records:  # one record larger than `max_bytes`
            length = _length(data)
            data += file.read(length if remaining is None else min(length, remaining - len(data)))
            records, offsets, used, end = _frames(data)
        if end in ("zeros", "damaged"):
            end = _classify_rest(data[used:], file) if until is None else "damaged"
        at_end = not file.read(1) if remaining is None else len(data) >= remaining
    if not at_end and end in ("end", "torn"):
        end = "more"
    return SegmentRead(records, offset + used, end, [offset + at for at in offsets])


def read_frames(path: Path, offsets: Iterable[int]) -> list[Shipment]:
    """Return the records whose frames begin at these offsets, except damaged ones. Raises OSError."""
    records: list[Shipment] = []
    with path.open("rb", buffering=0) as file:
        for offset in offsets:
            data = os.pread(file.fileno(), _USUAL_FRAME_BYTES, offset)
            size = _length(data)
            records += _frames(data[:size] if size <= len(data) else os.pread(file.fileno(), size, offset))[0]
    return records


def decode_frames(frames: Iterable[bytes]) -> list[Shipment]:
    """Return the records of frames that `frame` made."""
    return [_decode(memoryview(one)[_HEAD.size :]) for one in frames]


def next_frame(path: Path, offset: int) -> int | None:
    """Return where the first complete record at or after `offset` begins, whatever precedes it. Raises OSError.

    Searches for the beginning of a payload, where a record states its type. These bytes are not valid UTF-8, so no
    text within a record contains them.
    """
    data = path.read_bytes()
    offset = max(offset, len(MAGIC))
    found = (match.start() - _HEAD.size for match in _PAYLOAD.finditer(data, offset + _HEAD.size))
    return next((at for at in found if at >= offset and _is_frame(data, at)), None)


def _is_frame(data: bytes, at: int) -> bool:
    length, checksum = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    return bool(0 < length <= len(data) - start) and crc32(memoryview(data)[start : start + length]) == checksum


def _classify_rest(data: bytes, file: BinaryIO) -> str:
    """Return what follows the last record: "end" or "torn" if zeros reach to the file's end, else "damaged".

    Pre-allocated zeros follow the last record; a frame that ends in them was torn by a crash.
    """
    last = data.rstrip(b"\0")
    if len(last) >= _length(data) and last:
        return "damaged"
    while rest := file.read(_CHUNK):
        if rest.count(0) < len(rest):
            return "damaged"
    return "torn" if last else "end"


def _length(data: bytes) -> int:
    """Return the maximum number of bytes of the frame at the start of `data`."""
    if len(data) < _HEAD.size:
        return _MAX_FRAME_BYTES
    length: int = _HEAD.unpack_from(data)[0]
    return min(length, _MAX_FRAME_BYTES) + _HEAD.size


def _frames(data: bytes) -> tuple[list[Shipment], list[int], int, str]:
    """Return the complete records at the start of `data`, where they begin, their bytes, and what follows."""
    records: list[Shipment] = []
    offsets: list[int] = []
    view, at = memoryview(data), 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            return records, offsets, at, "torn"
        length, checksum = _HEAD.unpack_from(data, at)
        if not length and not checksum:
            return records, offsets, at, "zeros"
        if length > _MAX_FRAME_BYTES:
            return records, offsets, at, "damaged"
        start = at + _HEAD.size
        if len(data) - start < length:
            return records, offsets, at, "torn"
        payload = view[start : start + length]
        if crc32(payload) != checksum:
            return records, offsets, at, "damaged"
        try:
            records.append(_decode(payload))
        except msgspec.DecodeError:
            return records, offsets, at, "damaged"
        offsets.append(at)
        at = start + length
    return records, offsets, at, "end"
