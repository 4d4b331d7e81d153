"""Task sets: read from files and the hub, split, and their rows by id."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from ratchet.store.errors import install_hint
from ratchet.store.reasons import DropReason
from ratchet.store.records import Trajectory
from ratchet.trainer.errors import (
    TaskSetError,
    TaskSetNotFound,
    TuningError,
)

# Which tasks are set aside for evaluation: they are served and recorded like any, and nothing is learnt from them.
#
# A fixed share of all hashes of a task's key (`trainer.release.held_out_share`). Whatever gives records to a learner
# asks here: grouping, warm starts and exports. Pure.


def is_held_out(group_key: str, share: float) -> bool:
    """Return whether a task is set aside; a larger share keeps those of a smaller."""
    return int.from_bytes(blake2b(group_key.encode(), digest_size=8).digest()) / 2**64 < share


def is_set_aside(run: Trajectory, share: float) -> bool:
    """Return whether a trajectory is of a task that is set aside, or was when it was grouped."""
    return run.drop_reason == DropReason.HELD_OUT or is_held_out(run.group_key, share)


# Task sets: what an agent is tuned and evaluated on; a folder, a file or a name of the Hugging Face hub.
#
# A folder holds one file per split (train.jsonl, test.jsonl, ...; shards such as train-00000-of-00002.parquet belong
# together); a single file is one split, named after the file where that is a usual name, else `train`. Rows are
# streamed.
#
# Promises: a task's id follows from its content alone, whatever the format, the order of keys or the place in the file;
# equal rows are one task, with a warning; a malformed row is an error that names its file and line.

log = logging.getLogger(__name__)

TRAIN, TEST = "train", "test"
_USUAL = frozenset({TRAIN, TEST, "validation", "valid", "val", "dev", "eval", "held_out"})
_SHARD = re.compile(r"-\d+-of-\d+$")
_SPLIT_REMEDY = "--test-size 0.2 (in Python test_size=0.2) makes a test split of one"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `id` 16 hex digits of its content's hash; `number` where it stands in its split, from 1."""

    id: str
    row: Mapping[str, Any]
    split: str
    number: int
    set: str = ""  # the task set's name


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A task set that can be read; nothing of it is in memory. `open` makes it."""

    name: str
    source: str
    _rows_of: Mapping[str, Callable[[], Iterator[Numbered]]]  # split -> its rows, read again at each call
    _chosen: Callable[[Task], bool] | None = None

    @classmethod
    def open(cls, source: str | Path, name: str | None = None) -> TaskSet:
        """Open a folder, a file or a hub name; `name` is what the set is called, else its own.

        Raises TaskSetNotFound.
        """
        path = Path(source).expanduser()
        own = name or _bare(path)
        if path.is_file():
            return cls(own, str(source), _of_file(path))
        if path.is_dir():
            return cls(own, str(source), _of_folder(path))
        if not _HUB_NAME.fullmatch(str(source)) or str(source)[0] in ".~" or ending(path):
            raise TaskSetNotFound(f"task set {source}: there is no such file or folder here ({Path.cwd()})")
        return cls(own, str(source), _of_hub(HubSet(str(source))))

    @classmethod
    def of_files(cls, name: str, files: Mapping[str, Path]) -> TaskSet:
        return cls(name, name, {split: _chain([file]) for split, file in files.items()})

    @classmethod
    def of_rows(cls, name: str, source: str, rows_of: Mapping[str, Callable[[], Iterator[Numbered]]]) -> TaskSet:
        """Return the set of these rows, split -> function that yields numbered rows, called at every reading."""
        return cls(name, source, rows_of)

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits, train first."""
        return tuple(sorted(self._rows_of, key=lambda split: (split != TRAIN, split)))

    def rows(
        self, split: str, limit: int | None = None, on_duplicate: Callable[[int, int], None] | None = None
    ) -> Iterator[Task]:
        """Yield the tasks of a split, each once; `on_duplicate` hears the numbers of a row and of its repetition.

        Raises TaskSetError.
        """
        self.check(split)
        return itertools.islice(self._tasks(split, on_duplicate), limit)

    def preview(self, split: str, n: int = 2) -> list[Mapping[str, Any]]:
        """Return the first rows of a split as they are. Raises as `rows` does."""
        self.check(split)
        if self._chosen is not None:
            return [task.row for task in self.rows(split, n)]
        found = [row for _, row in itertools.islice(self._rows_of[split](), n)]
        if not found:
            raise self._empty(split)
        return found

    def split(self, train_share: float = 0.8, seed: int = 0) -> TaskSet:
        """Return the set with its only split divided into train and test, by content: a task stays where it is.

        Raises TaskSetError where the set is split already.
        """
        if len(self._rows_of) != 1:
            raise TaskSetError(f"task set {self.name} has the splits {', '.join(self.splits())}: no --test-size")
        if not 0 < train_share < 1:
            raise TaskSetError(f"--test-size {1 - train_share:g}: it must lie between 0 and 1")
        (rows,) = self._rows_of.values()
        salt = f"{seed}:"

        def chosen(task: Task) -> bool:
            place = int(hashlib.sha256((salt + task.id).encode()).hexdigest()[:12], 16) / 16**12
            return (place < train_share) == (task.split == TRAIN)

        return TaskSet(self.name, self.source, {TRAIN: rows, TEST: rows}, chosen)

    def check(self, split: str) -> None:
        """Raise TaskSetError where there is no such split."""
        if split not in self._rows_of:
            raise TaskSetError(
                f"task set {self.name} has no split {split!r}; it has {', '.join(self.splits())}"
                + (f"; {_SPLIT_REMEDY}" if len(self._rows_of) == 1 else "")
            )

    def _tasks(self, split: str, on_duplicate: Callable[[int, int], None] | None) -> Iterator[Task]:
        seen: dict[int, int] = {}  # id -> number of the first row that has it
        again = 0
        for number, (_, row) in enumerate(self._rows_of[split](), 1):
            task = Task(content_id(row), row, split, number, self.name)
            if self._chosen is not None and not self._chosen(task):
                continue
            first = seen.setdefault(int(task.id, 16), number)
            if first == number:
                yield task
            elif on_duplicate is not None:
                on_duplicate(first, number)
            else:
                again += 1
        if not seen:
            raise self._empty(split)
        if again:
            log.warning("event=duplicate_tasks set=%s split=%s rows=%d kept=%d", self.name, split, again, len(seen))

    def _empty(self, split: str) -> TaskSetError:
        return TaskSetError(f"task set {self.name}: split {split} of {self.source} holds no row")


def content_id(row: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a row's content: equal for equal rows of every format.

    Keys count in any order; null and empty text count as missing, and numbers as their text, since CSV knows no other.
    """
    text = json.dumps(_canonical(row), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(key): _canonical(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def split_of(file: Path) -> str:
    return _SHARD.sub("", _bare(file))


def _bare(file: Path) -> str:
    """Return a file's name without the end that says how it is read."""
    return file.name[: len(file.name) - len(ending(file))]


def _of_file(file: Path) -> dict[str, Callable[[], Iterator[Numbered]]]:
    if not ending(file):
        suffix = "".join(file.suffixes[-2:]) or "no suffix"
        raise TaskSetNotFound(f"task set {file}: give one of {' '.join(READERS)} (text also as .gz), not {suffix}")
    split = split_of(file)
    return {split if split in _USUAL else TRAIN: lambda: read_rows(file)}


def _of_folder(folder: Path) -> dict[str, Callable[[], Iterator[Numbered]]]:
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and ending(file)]
    shards: dict[str, list[Path]] = {}
    for file in files:
        shards.setdefault(split_of(file), []).append(file)
    shards = {split: files for split, files in shards.items() if split in _USUAL or not _is_note(files)}
    if not shards:
        if any(folder.rglob("*.parquet")) or any(folder.rglob("*.jsonl")) or (folder / "README.md").exists():
            return _of_hub(HubSet(str(folder), local=True))
        raise TaskSetNotFound(
            f"task set {folder}: the folder holds no train.jsonl or other split ({' '.join(READERS)})"
        )
    for split, files in shards.items():
        if len(files) > 1 and not all(_SHARD.search(_bare(file)) for file in files):
            raise TaskSetError(f"task set {folder}: {' and '.join(f.name for f in files)} are both split {split}")
    if len(shards) == 1 and not _USUAL & shards.keys():
        shards = {TRAIN: next(iter(shards.values()))}
    return {split: _chain(files) for split, files in shards.items()}


def _is_note(files: list[Path]) -> bool:
    """Whether files beside the splits are something else: notes and descriptions, not tasks."""
    return all(ending(file) in (".txt", ".json") for file in files)


def _chain(files: list[Path]) -> Callable[[], Iterator[Numbered]]:
    return lambda: itertools.chain.from_iterable(map(read_rows, files))


def _of_hub(hub: HubSet) -> dict[str, Callable[[], Iterator[Numbered]]]:
    def reader(split: str) -> Callable[[], Iterator[Numbered]]:
        return lambda: hub.rows(split)

    return {split: reader(split) for split in hub.splits()}


# Rows of a data set on the Hugging Face hub, streamed with `datasets`. HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE apply.
#
# A name is `owner/name`, or `owner/name:configuration`. Without a network, the error comes within seconds.

_TIMEOUT = 5.0  # seconds


class HubSet:
    """A data set of the hub, or a folder in the hub's own layout."""

    def __init__(self, name: str, *, local: bool = False, environ: Mapping[str, str] = os.environ) -> None:
        self._path, _, configuration = (name, "", "") if local else name.partition(":")
        self._configuration = configuration or None
        self._environ = environ
        self._local = local

    def splits(self) -> tuple[str, ...]:
        """Return the names of its splits. Raises TaskSetNotFound."""
        datasets = self._library()
        try:
            return tuple(datasets.get_dataset_split_names(self._path, self._configuration))
        except Exception as error:  # the library raises whatever its readers and its network raise
            raise self._not_found(error) from error

    def rows(self, split: str) -> Iterator[Numbered]:
        """Yield (number, row) of a split. Raises TaskSetError."""
        datasets = self._library()
        try:
            rows = iter(datasets.load_dataset(self._path, self._configuration, split=split, streaming=True))
        except Exception as error:  # as above
            raise self._not_found(error) from error
        number = 0
        while True:
            number += 1
            try:
                row: Any = next(rows, None)
            except Exception as error:  # as above
                raise TaskSetError(f"{self._path}, split {split}, row {number}: {_sentence(error)}") from error
            if row is None:
                return
            yield number, checked(row, f"{self._path}, split {split}, row {number}")

    def _library(self) -> Any:
        try:
            if not self._local:
                self._reach()
            import datasets
        except ImportError as error:
            raise TuningError(
                f"{self._path}: reading data sets of the hub needs datasets: {install_hint('trainer')}"
            ) from error
        return datasets

    def _reach(self) -> None:
        """Check that the hub answers; the library would retry for minutes."""
        import httpx
        from huggingface_hub import constants

        if self._environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            return  # only the cache is read
        hub = self._environ.get("HF_ENDPOINT") or constants.ENDPOINT
        try:
            httpx.head(hub, timeout=_TIMEOUT)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TaskSetNotFound(
                f"{self._path} is not a path here, and the hub at {hub} cannot be reached ({_sentence(error)}); "
                "give a local path, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to read what is cached"
            ) from error

    def _not_found(self, error: Exception) -> TaskSetNotFound:
        return TaskSetNotFound(
            f"{self._path}: `datasets` cannot load it: {_sentence(error)}; give a file (.jsonl .json .csv .parquet "
            ".txt), a folder with train.jsonl and test.jsonl, or a hub name such as owner/name or owner/name:config"
        )


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# Rows of one local file: .jsonl, .json, .csv, .txt (each also as .gz), .parquet; streamed, each with its line.
#
# Guarantees: no file is read further than the requested rows; a row has exactly the content of the file; an error names
# file and line. Rows are JSON objects, CSV rows by their header (all text), lines of text as {"text": line}, Parquet
# rows by column. Bytes and numbers that are not finite are refused.
#
# `datasets.load_dataset` reads data sets of the hub, not local files. Measured with datasets 5.2, it
# changes rows: missing keys become null, 1 becomes 1.0, dates in text become datetimes, 007 in CSV becomes 7.0, short
# CSV rows are filled, repeated columns renamed. Its errors have no line ("JSON parse error in row 1" of a block), a
# path with [1] is read as a pattern and not found, and the first file of 20,000 rows takes 3.5 s of CPU instead of 0.2
# s. It reads Parquet with pyarrow, as this module does.

Row = Mapping[str, Any]
Numbered = tuple[int, Row]

_MAX_ROW_CHARS = 16 * 2**20  # of one row
_CHUNK_CHARS = 2**16  # read at once of a JSON list
_PARQUET_BATCH = 256  # Parquet rows
_MAX_DEPTH = 100  # levels of one row
_GZIP = ".gz"
_UNREADABLE = (UnicodeDecodeError, OSError, EOFError, zlib.error)  # errors of reading text, compressed or not


def read_rows(file: Path) -> Iterator[Numbered]:
    """Yield (line, row) of a file; in Parquet files the line is the row's number. Raises TaskSetError."""
    return READERS[ending(file).removesuffix(_GZIP)](file)


def ending(file: Path) -> str:
    """Return the suffix that selects the reader, in lower case; empty if no reader does."""
    last = file.suffix.lower()
    if last == _GZIP:
        inner = Path(file.stem).suffix.lower()
        return inner + last if inner in READERS and inner != ".parquet" else ""
    return last if last in READERS else ""


def checked(row: Any, where: str) -> Row:
    """Return a row as a JSON object. Raises TaskSetError."""
    if not isinstance(row, dict):
        raise TaskSetError(f'{where}: a row is an object, such as {{"question": ...}}, not {type(row).__name__}')
    try:
        return {_text(str(key), "a key"): _plain(value, str(key), 1) for key, value in row.items()}
    except ValueError as error:
        raise TaskSetError(f"{where}: {error}") from error


def _plain(value: Any, path: str, depth: int) -> Any:
    """Return a value as JSON; dates as ISO text. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{path[:100]}... is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return _text(value, path)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON does not have; leave it out or write null")
        return value
    if isinstance(value, dict):
        return {
            _text(str(key), f"a key of {path}"): _plain(inner, f"{path}.{key}", depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{path}[{place}]", depth + 1) for place, inner in enumerate(value)]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return _plain(float(value), path, depth)
    raise ValueError(f"{path} holds {type(value).__name__}, which is no JSON; store a path or text instead")


def _text(text: str, path: str) -> str:
    """Return a text. Raises ValueError if it has a lone surrogate, which no other text format can store."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path} has half of a surrogate pair at character {error.start + 1} ({text[error.start]!a}), which is no "
            "text: write the whole pair, or leave it out"
        ) from error
    return text


def _jsonl(file: Path) -> Iterator[Numbered]:
    with _open(file) as text:
        for number, line in _lines(file, text):
            if line.strip():
                yield number, checked(_parsed(line, f"{file}, line {number}"), f"{file}, line {number}")


def _json(file: Path) -> Iterator[Numbered]:
    """Read a list of rows piece by piece, or JSON Lines, which some tools write under this name."""
    with _open(file) as text:
        first = next((line.lstrip()[:1] for _, line in _lines(file, text) if line.strip()), "")
    if first != "[":
        yield from _jsonl(file)
        return
    with _open(file) as text:
        yield from _elements(file, text)


def _elements(file: Path, text: TextIO) -> Iterator[Numbered]:
    """Yield the elements of the JSON list that the text holds, keeping one of them in memory."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    rest, line, started = "", 1, False
    while True:
        try:
            piece = text.read(max(_CHUNK_CHARS, len(rest)))  # doubles while an element does not end
        except _UNREADABLE as error:
            raise TaskSetError(f"{file}, after line {line}: {_read_problem(error)}") from error
        rest += piece
        while True:
            bare = rest.lstrip(" \t\r\n," if started else " \t\r\n")
            line += rest.count("\n", 0, len(rest) - len(bare))
            rest = bare
            if not started and rest:
                rest, started = rest[1:], True
                continue
            if not rest or rest[0] == "]":
                break
            try:
                row, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError) as error:
                if piece and len(rest) <= _MAX_ROW_CHARS:
                    break  # the element may continue in the next piece
                raise TaskSetError(f"{file}, line {line}: {_json_problem(error)}") from error
            yield line, checked(row, f"{file}, line {line}")
            line += rest.count("\n", 0, end)
            rest = rest[end:]
        if rest[:1] == "]":
            return
        if not piece:
            raise TaskSetError(f"{file}, line {line}: the list does not end; the file is cut off")


def _csv(file: Path) -> Iterator[Numbered]:
    csv.field_size_limit(_MAX_ROW_CHARS)
    with _open(file) as text:
        rows = csv.reader(text, strict=True)
        header = _record(file, rows) or []
        if len(set(header)) < len(header) or not all(header):
            raise TaskSetError(f"{file}, line 1: the header must name every column once, it is {header}")
        while True:
            line = rows.line_num + 1  # first line of the row, which may contain line breaks
            row = _record(file, rows)
            if row is None:
                return
            if row and len(row) != len(header):
                raise TaskSetError(f"{file}, line {line}: {len(row)} fields, the header has {len(header)}")
            if row:
                yield line, dict(zip(header, row, strict=True))


def _record(file: Path, rows: Any) -> list[str] | None:
    line = rows.line_num + 1
    try:
        record: list[str] | None = next(rows, None)
    except (csv.Error, *_UNREADABLE) as error:
        raise TaskSetError(f"{file}, line {line}: {_read_problem(error)}") from error
    return record


def _txt(file: Path) -> Iterator[Numbered]:
    with _open(file) as text:
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
            for batch in opened.iter_batches(_PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, checked(row, f"{file}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskSetError(f"{file}, after row {number}: {error}") from error


def _open(file: Path) -> TextIO:
    try:
        binary: Any = gzip.GzipFile(file) if file.suffix.lower() == _GZIP else file.open("rb")
        return io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TaskSetNotFound(f"{file} cannot be read: {error.strerror}") from error


def _lines(file: Path, text: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        number += 1
        try:
            line = text.readline(_MAX_ROW_CHARS + 1)
        except _UNREADABLE as error:
            raise TaskSetError(f"{file}, line {number} or just after it: {_read_problem(error)}") from error
        if len(line) > _MAX_ROW_CHARS:
            raise TaskSetError(f"{file}, line {number}: longer than {_MAX_ROW_CHARS:,} characters")
        if not line:
            return
        yield number, line


def _read_problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason}; save the file as UTF-8"
    return str(error)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TaskSetError(f"{where}: {_json_problem(error)}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; leave the field out or write null")


def _json_problem(error: Exception) -> str:
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
