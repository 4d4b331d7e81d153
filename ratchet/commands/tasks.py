"""The commands `ratchet tasks`: preview a task set, import one under a name, list the imported ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import prints_json, show

if TYPE_CHECKING:
    from ratchet.tuner.tasks import ImportedTasks


_ROWS_PER_UPDATE = 1000  # of the progress bar


@click.group()
def tasks() -> None:
    """Preview and import task sets.

    \b
    Example:
      ratchet tasks preview my_dataset --split train -n 2
    """


@tasks.command()
@click.argument("source", metavar="NAME_OR_SOURCE")
@click.option("--split", default="train", show_default=True, help="Split to print.")
@click.option("-n", "count", type=click.IntRange(1, 10_000), default=2, show_default=True, help="Number of rows.")
@options.project
@click.pass_context
def preview(context: click.Context, /, source: str, split: str, count: int, **_: Any) -> None:
    """Print the first rows of a task set as a JSON list.

    \b
    Example:
      ratchet tasks preview my_dataset --split train -n 2
      ratchet tasks preview openai/gsm8k:main --split test
    """
    import json

    from ratchet.trainer.tasks import TaskSet, ending

    # A file needs no settings; reading them takes longer than reading rows.
    is_file = bool(ending(Path(source))) and Path(source).is_file()
    found = TaskSet.open(source) if is_file else _imported(context).open(source)
    rows = found.preview(split, count)
    click.echo(_visible(json.dumps(rows, indent=2, ensure_ascii=False)))


@tasks.command("import")
@click.argument("source")
@click.option("--name", help="Name of the set.  [default: the source's name]")
@click.option("--replace", is_flag=True, help="Replace an existing set of that name.")
@options.test_size
@options.seed
@options.project
@options.as_json
@click.pass_context
def import_(
    context: click.Context, /, source: str, name: str | None, replace: bool, test_size: float | None, seed: int | None,
    **_: Any,
) -> None:  # fmt: skip
    """Copy a task set into the project's state folder, atomically; equal rows are stored once.

    \b
    Example:
      ratchet tasks import my_dataset --name sums
      ratchet tasks import questions.csv --test-size 0.2
      cd examples/verifiers && ratchet tasks import verifiers:math_calculator --test-size 0.2
    """
    from ratchet.output import progress_bars
    from ratchet.tuner.tasks import open_source

    opened = open_source(source)
    if test_size is not None:
        opened = opened.split(1 - test_size, seed or 0)
    with progress_bars() as report_progress:
        on_row = _every(_ROWS_PER_UPDATE, lambda rows: report_progress("importing", rows, None))
        made = _imported(context).add(opened, name or opened.name, replace=replace, on_row=on_row)
    show(made, [f"{made.name}: {_counts(made.splits)}"])
    if prints_json():
        return
    for split, rows in made.duplicates.items():
        click.echo(f"{rows} rows of {split} are duplicates and were skipped", err=True)
    if made.in_several:
        click.echo(f"{made.in_several} tasks are in more than one split: do not evaluate on training tasks", err=True)


@tasks.command("list")
@options.project
@options.as_json
@click.pass_context
def list_(context: click.Context, /, **_: Any) -> None:
    """List the imported task sets.

    \b
    Example:
      ratchet tasks list
    """
    found = _imported(context).all()
    show(found, (f"{one.name}  {_counts(one.splits)}  from {one.source}" for one in found))
    if not found and not prints_json():
        click.echo("no task set is imported: use `ratchet tasks import SOURCE --name NAME`", err=True)


def _imported(context: click.Context) -> ImportedTasks:
    from ratchet.tuner.tasks import ImportedTasks

    return ImportedTasks(options.read_settings(context).state.tasks)


def _every(count: int, call: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that passes `count` to `call` once per `count` calls."""
    numbers = itertools.count(1)
    return lambda: call(count) if next(numbers) % count == 0 else None


def _counts(splits: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in splits.items())


def _visible(text: str) -> str:
    """Escape non-printable characters of JSON text, which could control the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    import json

    return json.dumps(char)[1:-1] if ord(char) > 0x7F else f"\\u{ord(char):04x}"
