"""`ratchet store export`: trajectories as JSON Lines or Parquet for other tools, streamed, complete or not at all."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.errors import CliError
from ratchet.output import progress_bars
from ratchet.store.errors import install_hint

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter
    from ratchet.store.store import Store
    from ratchet.trainer.rows.trajectory_export import Exported

_PAGE = 100
_BATCH = 64  # trajectories in one row group


@click.command()
@click.option(
    "--format",
    "shape",
    type=click.Choice(["jsonl", "parquet", "trl"]),
    default="jsonl",
    help="One trajectory per line or row, or one training row per line in TRL's columns.  [default: jsonl]",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Output file.  [default: standard output]")
@options.trajectory_filters
@options.with_project
def export(settings: Settings, store: Store, shape: str, out: Path | None, **filters: Any) -> None:
    """Export trajectories that match every option, newest first, with the engine's token ids, masks and logprobs.

    Training rows (trl) come from live traffic and resamples only: evaluations and held-out tasks are skipped.

    \b
    Example:
      ratchet store export --format parquet --state trained --out trained.parquet
    """
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter
    from ratchet.trainer.rows.trajectory_export import training_records, trajectory_record

    if shape == "parquet" and out is None:
        raise click.UsageError("Parquet needs a file: give --out FILE")
    chosen = TrajectoryFilter(**filters)
    if not store.trajectories.page(1, chosen=chosen):
        options.check_listed_alias(store, filters["alias"])
    found = _chosen(store, chosen)
    records: Iterable[dict[str, Any]] = map(trajectory_record, found)
    if shape == "trl":
        held_out = settings.trainer.release.held_out_share
        records = (row for one in _trainable(found, held_out) for row in training_records(one, held_out))
    with _whole_file(out) as file:
        count = (_write_parquet if shape == "parquet" else _write_lines)(records, file)
    click.echo(f"{count} {'training rows' if shape == 'trl' else 'trajectories'}: {out or 'standard output'}", err=True)


def _trainable(found: Iterable[Exported], held_out: float) -> Iterator[Exported]:
    """Yield the trajectories that may have training rows; print the counts of the others by reason."""
    from ratchet.trainer.rows.trajectory_export import why_no_rows

    left_out: Counter[str] = Counter()
    for one in found:
        if (why := why_no_rows(one.transcript.trajectory, held_out)) is None:
            yield one
        else:
            left_out[why] += 1
    for why, count in left_out.items():
        click.echo(f"{count} {why} skipped: not training data", err=True)


def _chosen(store: Store, chosen: TrajectoryFilter) -> Iterator[Exported]:
    """Yield the chosen trajectories one at a time, except those deleted meanwhile."""
    from ratchet.store.errors import RecordNotFound
    from ratchet.trainer.rows.trajectory_export import Exported

    advantages = lru_cache(maxsize=256)(lambda group: _advantages(store, group))
    total = store.deletions.count(chosen)
    last: str | None = None
    with progress_bars() as report_progress:
        while page := store.trajectories.page(_PAGE, last, chosen=chosen):
            verdicts = store.groups.verdicts([run.id for run in page])
            for run in page:
                try:
                    transcript = store.trajectories.read(run.id)
                except RecordNotFound:
                    continue
                calls = store.trajectories.context_calls(transcript)
                advantage = advantages(run.group_id).get(run.id) if run.group_id else None
                yield Exported(transcript, calls, verdicts.get(run.id), advantage)
            report_progress("exporting", len(page), total)
            last = page[-1].id


def _advantages(store: Store, group_id: str) -> dict[str, float]:
    """Return the advantages of a group's members; empty unless every member has a score."""
    from ratchet.trainer.advantages import group_advantages

    members = store.groups.get(group_id).members
    scores = store.groups.scores(members)
    if len(members) < 2 or any(name not in scores for name in members):
        return {}
    return dict(zip(members, group_advantages([scores[name] for name in members]), strict=True))


@contextmanager
def _whole_file(out: Path | None) -> Iterator[Any]:
    """Open a file that gets its name when the block succeeds; None: standard output. Raises CliError."""
    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        file = temporary.open("wb")
    except OSError as error:
        raise CliError(f"--out {out}: {error.strerror}: name a file in an existing folder") from error
    try:
        with file:
            yield file
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _write_lines(records: Iterable[dict[str, Any]], file: Any) -> int:
    """Write one JSON object per line; return the count."""
    import msgspec

    count = 0
    for record in records:
        file.write(msgspec.json.encode(record) + b"\n")
        count += 1
    return count


def _write_parquet(records: Iterable[dict[str, Any]], file: Any) -> int:
    """Write row groups; return the number of rows. Raises CliError if pyarrow is missing."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise CliError(f"--format parquet needs pyarrow: {install_hint('export')}") from error
    schema, count, remaining = _schema(arrow), 0, iter(records)
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(remaining, _BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


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
    columns = {
        "id": text, "alias": text, "version": whole, "state": text, "purpose": text, "task": text,
        "group_id": text, "round_id": text, "drop_reason": text, "opened_at": number, "last_active_at": number,
        "score": number, "advantage": number, "judge": text, "judge_version": text, "explanation": text,
        "messages": arrow.list_(message), "tools": text, "messages_json": text, "rows": arrow.list_(row),
        "untrained": text, "calls": arrow.list_(call),
    }  # fmt: skip
    return arrow.schema(list(columns.items()))
