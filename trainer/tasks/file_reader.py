"""Rows of one local file: .jsonl, .json, .csv, .txt (each also as .gz), .parquet; streamed, each with its line.

Promises: no file is read further than the rows that are asked for; a row comes out exactly as it went in (no column is
added, no type guessed); whatever cannot be read names file and line. Rows are JSON objects, CSV rows by their header
(all text), lines of text as {"text": line}, Parquet rows by column. Bytes and numbers that are not finite are refused.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from ratchet.store.install_hint import install_hint
from ratchet.trainer.errors import MalformedTaskRow, TaskSetNotFound, TuningError

Row = Mapping[str, Any]
Numbered = tuple[int, Row]

_LONGEST = 16 * 2**20  # characters of one row
_CHUNK = 2**16  # characters read at once of a JSON list
_BATCH = 256  # Parquet rows
_DEEPEST = 100  # levels of one row
_ZIPPED = ".gz"
_UNREADABLE = (UnicodeDecodeError, OSError, EOFError, zlib.error)  # what text, zipped or not, may turn out to be


def read_rows(file: Path) -> Iterator[Numbered]:
    """Yield (line, row) of a file; in Parquet files the line is the row's number. Raises MalformedTaskRow."""
    return READERS[ending(file).removesuffix(_ZIPPED)](file)


def ending(file: Path) -> str:
    """Return the end of a name that says how the file is read, in lower case; empty where nothing reads it."""
    last = file.suffix.lower()
    if last == _ZIPPED:
        inner = Path(file.stem).suffix.lower()
        return inner + last if inner in READERS and inner != ".parquet" else ""
    return last if last in READERS else ""


def checked(row: Any, where: str) -> Row:
    """Return a row that is a JSON object all through. Raises MalformedTaskRow."""
    if not isinstance(row, dict):
        raise MalformedTaskRow(f'{where}: a row is an object, such as {{"question": ...}}, not {type(row).__name__}')
    try:
        return {str(key): _plain(value, str(key), 1) for key, value in row.items()}
    except ValueError as error:
        raise MalformedTaskRow(f"{where}: {error}") from error


def _plain(value: Any, path: str, depth: int) -> Any:
    """Return a value as JSON knows it; dates as ISO text."""
    if depth > _DEEPEST:
        raise ValueError(f"{path[:100]}... is nested deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON does not know; leave it out or write null")
        return value
    if isinstance(value, dict):
        return {str(key): _plain(inner, f"{path}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{path}[{place}]", depth + 1) for place, inner in enumerate(value)]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return _plain(float(value), path, depth)
    raise ValueError(f"{path} holds {type(value).__name__}, which is no JSON; store a path or text instead")


def _jsonl(file: Path) -> Iterator[Numbered]:
    with _opened(file) as text:
        for number, line in _lines(file, text):
            if line.strip():
                yield number, checked(_parsed(line, f"{file}, line {number}"), f"{file}, line {number}")


def _json(file: Path) -> Iterator[Numbered]:
    """A list of rows, read piece by piece; one row per line, as some tools write it, is read as well."""
    with _opened(file) as text:
        first = next((line.lstrip()[:1] for _, line in _lines(file, text) if line.strip()), "")
    if first != "[":
        yield from _jsonl(file)
        return
    with _opened(file) as text:
        yield from _elements(file, text)


def _elements(file: Path, text: TextIO) -> Iterator[Numbered]:
    """Yield the elements of the JSON list that the text holds, keeping one of them in memory."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    rest, line, begun = "", 1, False
    while True:
        try:
            piece = text.read(max(_CHUNK, len(rest)))  # twice as much each time that an element did not end
        except _UNREADABLE as error:
            raise MalformedTaskRow(f"{file}, after line {line}: {_why(error)}") from error
        rest += piece
        while True:
            bare = rest.lstrip(" \t\r\n," if begun else " \t\r\n")
            line += rest.count("\n", 0, len(rest) - len(bare))
            rest = bare
            if not begun and rest:
                rest, begun = rest[1:], True
                continue
            if not rest or rest[0] == "]":
                break
            try:
                row, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError) as error:
                if piece and len(rest) <= _LONGEST:
                    break  # the element may go on in what was not read yet
                raise MalformedTaskRow(f"{file}, line {line}: {_said(error)}") from error
            yield line, checked(row, f"{file}, line {line}")
            line += rest.count("\n", 0, end)
            rest = rest[end:]
        if rest[:1] == "]":
            return
        if not piece:
            raise MalformedTaskRow(f"{file}, line {line}: the list does not end; the file is cut off")


def _csv(file: Path) -> Iterator[Numbered]:
    csv.field_size_limit(_LONGEST)
    with _opened(file) as text:
        rows = csv.reader(text, strict=True)
        header = _record(file, rows) or []
        if len(set(header)) < len(header) or not all(header):
            raise MalformedTaskRow(f"{file}, line 1: the header must name every column once, it is {header}")
        while True:
            line = rows.line_num + 1  # where the row begins: it may hold line breaks
            row = _record(file, rows)
            if row is None:
                return
            if row and len(row) != len(header):
                raise MalformedTaskRow(f"{file}, line {line}: {len(row)} fields, the header has {len(header)}")
            if row:
                yield line, dict(zip(header, row, strict=True))


def _record(file: Path, rows: Any) -> list[str] | None:
    line = rows.line_num + 1
    try:
        record: list[str] | None = next(rows, None)
    except (csv.Error, *_UNREADABLE) as error:
        raise MalformedTaskRow(f"{file}, line {line}: {_why(error)}") from error
    return record


def _txt(file: Path) -> Iterator[Numbered]:
    with _opened(file) as text:
        for number, line in _lines(file, text):
            if line.strip():
                yield number, {"text": line.rstrip("\r\n")}


def _parquet(file: Path) -> Iterator[Numbered]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TuningError(f"{file}: reading Parquet needs pyarrow: {install_hint('export')}") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, checked(row, f"{file}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise MalformedTaskRow(f"{file}, after row {number}: {error}") from error


def _opened(file: Path) -> TextIO:
    try:
        opened: Any = gzip.GzipFile(file) if file.suffix.lower() == _ZIPPED else file.open("rb")
        return io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TaskSetNotFound(f"{file} cannot be read: {error.strerror}") from error


def _lines(file: Path, text: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        number += 1
        try:
            line = text.readline(_LONGEST + 1)
        except _UNREADABLE as error:
            raise MalformedTaskRow(f"{file}, line {number} or just after it: {_why(error)}") from error
        if len(line) > _LONGEST:
            raise MalformedTaskRow(f"{file}, line {number}: longer than {_LONGEST:,} characters")
        if not line:
            return
        yield number, line


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason}; save the file as UTF-8"
    return str(error)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedTaskRow(f"{where}: {_said(error)}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; leave the field out or write null")


def _said(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


READERS: Mapping[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _txt,
}
