"""`ratchet store export`: trajectories as files for other tools, streamed one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.options import trajectory_filters

if TYPE_CHECKING:
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter
    from ratchet.store.store import Store
    from ratchet.trainer.rows.trajectory_export import Exported

_PAGE = 100


@click.command()
@click.option(
    "--format",
    "shape",
    type=click.Choice(["jsonl", "parquet", "trl"]),
    default="jsonl",
    help="One trajectory per line or row, or one training row per line in TRL's columns.  [default: jsonl]",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Output file.  [default: standard output]")
@trajectory_filters
@options.store_url
@options.project
@click.pass_context
def export(
    context: click.Context, /, shape: str, out: Path | None, store: str | None, project: str | None, **filters: Any
) -> None:
    """Export trajectories that match every option, newest first, with the engine's token ids, masks and logprobs.

    Training rows (trl) come from live traffic and resamples only: evaluations and held-out tasks are skipped.

    \b
    Example:
      ratchet store export --format parquet --state trained --out trained.parquet
    """
    from ratchet.output.files import write_lines, write_parquet
    from ratchet.store.calls.trajectory_filter import TrajectoryFilter
    from ratchet.trainer.rows.trajectory_export import training_records, trajectory_record

    if shape == "parquet" and out is None:
        raise click.UsageError("Parquet needs a file: give --out FILE")
    settings = options.read_project_settings(context, {"store": store, "project": project})
    with options.open_store_for_command(settings.store_url) as opened:
        if not opened.trajectories.page(1, chosen=TrajectoryFilter(**filters)):
            options.check_listed_alias(opened, filters["alias"])
        found = _chosen(opened, TrajectoryFilter(**filters))
        records: Iterable[dict[str, Any]] = map(trajectory_record, found)
        if shape == "trl":
            held_out = options.held_out_share(settings)
            records = (row for one in _trainable(found, held_out) for row in training_records(one, held_out))
        count = write_parquet(records, out) if shape == "parquet" and out else write_lines(records, out)
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
    from ratchet.output.terminal import progress_bars
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
    from ratchet.trainer.controller.advantages import group_advantages

    members = store.groups.get(group_id).members
    verdicts = store.groups.verdicts(members)
    if len(members) < 2 or any(name not in verdicts for name in members):
        return {}
    scores = [verdicts[name].score or 0.0 for name in members]
    return dict(zip(members, group_advantages(scores), strict=True))
