"""Files that commands write: exports as JSON Lines or Parquet, complete or not at all, and plots."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ratchet.errors import CliError
from ratchet.store.install_hint import install_hint

_BATCH = 64  # trajectories in one row group


class ExportError(CliError):
    """The export cannot be written. The message names the remedy."""


def write_lines(records: Iterable[dict[str, Any]], out: Path | None) -> int:
    """Write one JSON object per line, to standard output without a file; return the count."""
    count = 0
    with _AtomicFile(out) as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def write_parquet(records: Iterable[dict[str, Any]], out: Path) -> int:
    """Write Parquet in row groups; return the number of rows. Raises ExportError if pyarrow is missing."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ExportError(f"--format parquet needs pyarrow: {install_hint('export')}") from error
    schema, count, remaining = _schema(arrow), 0, iter(records)
    with _AtomicFile(out) as file, parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(remaining, _BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


class _AtomicFile:
    """A file that gets its name when the block succeeds, and is removed otherwise."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._temporary = out.with_name(f".{out.name}.{os.getpid()}") if out else None

    def __enter__(self) -> Any:
        try:
            self._file = self._temporary.open("wb") if self._temporary else sys.stdout.buffer
        except OSError as error:
            raise ExportError(f"--out {self._out}: {error.strerror}: name a file in an existing folder") from error
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.flush()
        if self._temporary is None or self._out is None:
            return
        self._file.close()
        if kind is None:
            self._temporary.replace(self._out)
        else:
            self._temporary.unlink(missing_ok=True)


def _schema(arrow: Any) -> Any:
    """Return the columns of `trajectory_export.trajectory_record`."""
    text, number, whole = arrow.string(), arrow.float64(), arrow.int64()
    ids, logprobs = arrow.list_(arrow.int32()), arrow.list_(arrow.float32())

    def struct(**fields: Any) -> Any:
        return arrow.struct(list(fields.items()))

    tool_call = struct(id=text, type=text, function=struct(name=text, arguments=text))
    message = struct(
        role=text, content=text, reasoning_content=text, name=text, tool_call_id=text,
        tool_calls=arrow.list_(tool_call),
    )  # fmt: skip
    row = struct(
        input_ids=ids, mask=arrow.list_(arrow.int8()), logprobs=logprobs, temperature=number, importance=arrow.bool_()
    )
    answer = struct(index=whole, finish_reason=text, token_ids=ids, logprobs=logprobs)
    call = struct(
        id=text, state=text, dialect=text, linked_by=text, parent_call=text, parent_choice=whole, context=text,
        sampling=text, untrainable=text, started_at=number, ended_at=number, prompt_ids=ids,
        answers=arrow.list_(answer),
    )  # fmt: skip
    columns: Iterator[tuple[str, Any]] = iter(
        {
            "id": text, "alias": text, "version": whole, "state": text, "purpose": text, "task": text,
            "group_id": text, "round_id": text, "drop_reason": text, "opened_at": number, "last_active_at": number,
            "score": number, "advantage": number, "judge": text, "judge_version": text, "explanation": text,
            "messages": arrow.list_(message), "tools": text, "messages_json": text, "rows": arrow.list_(row),
            "untrained": text, "calls": arrow.list_(call),
        }.items()
    )  # fmt: skip
    return arrow.schema(list(columns))


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files only. Raises CliError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise CliError(f"a plot needs matplotlib: {install_hint('demo')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as loaded

    return loaded
