"""Files that an export is written to: JSON lines or Parquet, a batch at a time; whole or not there at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ratchet.errors import CliError

_BATCH = 64  # trajectories in one row group


class ExportError(CliError):
    """The export cannot be written; the message names the remedy."""


def write_lines(records: Iterable[dict[str, Any]], out: Path | None) -> int:
    """Write one JSON object a line, to standard output where there is no file; return how many."""
    count = 0
    with _whole(out) as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def write_parquet(records: Iterable[dict[str, Any]], out: Path) -> int:
    """Write Parquet, in row groups; return how many rows. Raises ExportError where its library is missing."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ExportError("--format parquet needs pyarrow: pip install 'ratchet-rl[export]'") from error
    schema, count, left = _schema(arrow), 0, iter(records)
    with _whole(out) as file, parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(left, _BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


class _whole:
    """A file that takes its name when the block has ended well, and is gone where it has not."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._aside = out.with_name(f".{out.name}.{os.getpid()}") if out else None

    def __enter__(self) -> Any:
        try:
            self._file = self._aside.open("wb") if self._aside else sys.stdout.buffer
        except OSError as error:
            raise ExportError(f"--out {self._out}: {error.strerror}: name a file in a folder that is there") from error
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.flush()
        if self._aside is None or self._out is None:
            return
        self._file.close()
        if kind is None:
            self._aside.replace(self._out)
        else:
            self._aside.unlink(missing_ok=True)


def _schema(arrow: Any) -> Any:
    """Return the columns of `trainer.exports.trajectory_record`."""
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
