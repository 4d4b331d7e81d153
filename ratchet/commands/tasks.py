"""The commands about task sets: look at one, import one under a name, list what was imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output.terminal import strip_control_characters

if TYPE_CHECKING:
    from ratchet.tuner.tasks.imported import ImportedTasks


@click.group()
def tasks() -> None:
    """Look at task sets and import them.

    \b
    Example:
      ratchet tasks preview my_dataset --split train -n 2
    """


@tasks.command()
@click.argument("source", metavar="NAME_OR_SOURCE")
@click.option("--split", default="train", show_default=True, help="Split to look at.")
@click.option("-n", "count", type=click.IntRange(1, 10_000), default=2, show_default=True, help="How many rows.")
@options.project
@click.pass_context
def preview(context: click.Context, source: str, split: str, count: int, project: str | None) -> None:
    """Print the first rows of a task set, exactly as they are, as a JSON list.

    \b
    Example:
      ratchet tasks preview my_dataset --split train -n 2
      ratchet tasks preview openai/gsm8k:main --split test
    """
    import json

    from ratchet.trainer.tasks.file_reader import ending
    from ratchet.trainer.tasks.task_set import TaskSet

    # A file needs no settings, which take longer to read than its rows.
    is_file = bool(ending(Path(source))) and Path(source).is_file()
    found = TaskSet.open(source) if is_file else _imported(context, project).open(source)
    rows = found.preview(split, count)
    click.echo(_visible(json.dumps(rows, indent=2, ensure_ascii=False)))


@tasks.command("import")
@click.argument("source")
@click.option("--name", help="What the set is called.  [default: the source's own name]")
@click.option("--replace", is_flag=True, help="Put it in the place of a set of that name.")
@options.test_size
@options.seed
@options.project
@options.as_json
@click.pass_context
def import_(
    context: click.Context,
    source: str,
    name: str | None,
    replace: bool,
    test_size: float | None,
    seed: int | None,
    project: str | None,
    as_json: bool,
) -> None:
    """Copy a task set into the project's state folder: whole or not at all, equal rows once.

    \b
    Example:
      ratchet tasks import my_dataset --name sums
      ratchet tasks import questions.csv --test-size 0.2
    """
    import dataclasses

    from tqdm import tqdm

    from ratchet.trainer.tasks.task_set import TaskSet

    opened = TaskSet.open(source)
    if test_size is not None:
        opened = opened.split(1 - test_size, seed or 0)
    with tqdm(unit=" tasks", mininterval=0.5, leave=False, disable=not sys.stderr.isatty()) as bar:
        made = _imported(context, project).add(opened, name or opened.name, replace=replace, on_row=bar.update)
    if as_json:
        options.print_json(dataclasses.asdict(made))
        return
    click.echo(f"{made.name}: {_counts(made.splits)}")
    for split, rows in made.duplicates.items():
        click.echo(f"{rows} rows of {split} are equal to others: each is one task", err=True)
    if made.in_several:
        click.echo(f"{made.in_several} tasks stand in more than one split: test none that is trained", err=True)


@tasks.command("list")
@options.project
@options.as_json
@click.pass_context
def list_(context: click.Context, project: str | None, as_json: bool) -> None:
    """List the imported task sets.

    \b
    Example:
      ratchet tasks list
    """
    import dataclasses

    found = _imported(context, project).all()
    if as_json:
        options.print_json([dataclasses.asdict(one) for one in found])
        return
    for one in found:
        click.echo(f"{one.name}  {_counts(one.splits)}  from {strip_control_characters(one.source)}")
    if not found:
        click.echo("no task set is imported; `ratchet tasks import SOURCE --name NAME` does it", err=True)


def _imported(context: click.Context, project: str | None) -> ImportedTasks:
    from ratchet.tuner.tasks.imported import ImportedTasks

    return ImportedTasks(options.read_settings(context, {"project": project}).state.tasks)


def _counts(splits: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in splits.items())


def _visible(text: str) -> str:
    """Return JSON whose characters cannot steer a terminal: what is not printable is escaped, as JSON allows."""
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    import json

    return json.dumps(char)[1:-1] if ord(char) > 0x7F else f"\\u{ord(char):04x}"
