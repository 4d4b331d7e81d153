"""Tables on the terminal; wide enough for their columns where nobody sees a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

_WIDTH = 160  # columns where no terminal says


def printed(table: Any, lines: Iterable[str] = ()) -> None:
    """Print a rich table, and lines under it."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(table)
    for line in lines:
        console.print(strip_control_characters(line), soft_wrap=True, markup=False)


def print_records(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table of recorded things, whose words are anybody's; the first column is an id, which stays whole."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for cells in rows:
        drawn.add_row(*(Text(strip_control_characters(cell)) for cell in cells))
    printed(drawn)


def strip_control_characters(text: Any) -> str:
    """Return text that cannot steer a terminal: what agents and their users wrote is printed."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def format_time(moment: float) -> str:
    """Return a moment (Unix seconds) as people read it, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")
