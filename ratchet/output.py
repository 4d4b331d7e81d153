"""What commands print: results as JSON, lines or a table; notes, progress and plots.

Slow imports happen when something is printed, not before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import click

from ratchet.errors import CliError
from ratchet.store.errors import install_hint

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import TaskID

_WIDTH = 160  # columns of a table that is not printed to a terminal
_LINE_SECONDS = 10.0  # between lines of progress


def show(data: Any, lines: Iterable[Any] = (), *, columns: Sequence[str] = (), empty: str = "") -> None:
    """Print the result of a command: as JSON with --json, else as lines, or as rows of a table with `columns`.

    `empty` is printed in place of data that is empty. Control characters of recorded text are removed.
    """
    if prints_json():
        print_json(data)
    elif empty and not data:
        click.echo(empty)
    elif columns:
        print_records(columns, lines)
    else:
        for line in lines:
            click.echo(strip_control_characters(line))


def prints_json() -> bool:
    """Return whether the command was given --json."""
    return bool(click.get_current_context().params.get("as_json"))


def print_json(content: Any) -> None:
    """Print data as JSON; records and dataclasses as objects."""
    import json

    click.echo(json.dumps(content, indent=2, default=_json_value))


def _json_value(value: Any) -> Any:
    import dataclasses

    import msgspec

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return plain(value) if isinstance(value, msgspec.Struct) else str(value)


def plain(record: Any, **more: Any) -> dict[str, Any]:
    """Return the fields of a record, and more."""
    import msgspec

    return msgspec.structs.asdict(record) | more


def print_table(table: Any, lines: Iterable[str] = (), *, width: int = _WIDTH, file: TextIO | None = None) -> None:
    """Print a rich table, and lines below it, to stdout or a file. `width` applies if that is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if file is not None:  # plain text, also in a notebook: rich would display it there, and write nothing to the file
        console = Console(highlight=False, width=width, file=file, force_terminal=False, force_jupyter=False)
    elif not console.is_terminal:
        console = Console(highlight=False, width=width)
    console.print(table)
    for line in lines:
        console.print(strip_control_characters(line), soft_wrap=True, markup=False)


def print_records(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table of recorded data, without control characters. The first column is an id, which is not wrapped."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for cells in rows:
        table.add_row(*(Text(strip_control_characters(cell)) for cell in cells))
    print_table(table)


def strip_control_characters(text: Any) -> str:
    """Replace control characters: recorded text of agents and their users must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def print_note(text: str) -> None:
    """Print a line on stderr, without control characters."""
    print(strip_control_characters(text), file=sys.stderr, flush=True)


def format_time(seconds: float) -> str:
    """Format a time (Unix seconds) in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show progress on stderr during the block; call the value with (name, newly done, total or None).

    If stderr is not a terminal, a line is printed every `_LINE_SECONDS` seconds if the total is known.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield ProgressLines()
        return
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def advance(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.advance(tasks[name], done)

        yield advance


class ProgressLines:
    """Prints a line of progress now and then, for output that is not a terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: dict[str, int] = {}
        self._printed_at = self._started_at = clock()

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Add `done` to the count of `name`."""
        so_far = self._done[name] = self._done.get(name, 0) + done
        now = self._clock()
        if total is not None and now - self._printed_at >= _LINE_SECONDS and 0 < so_far < total:
            self._printed_at = now
            left = (now - self._started_at) / so_far * (total - so_far)
            print(f"{name} {so_far:,} of {total:,}, {left:.0f} s left", file=sys.stderr, flush=True)


@contextmanager
def drawing(path: Path, columns: int = 1, size: tuple[float, float] = (8, 4.5), **given: Any) -> Iterator[Any]:
    """Yield the axes of a picture, which is written to a file at the end of the block. Raises CliError."""
    try:
        import matplotlib
    except ImportError as error:
        raise CliError(f"a plot needs matplotlib: {install_hint('demo')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size, dpi=120, **given)
    yield axes
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
