"""`ratchet tune report`: the report of the tuner as text, Markdown, JSON or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.output.plots import pyplot
from ratchet.output.tables import format_time, strip_control_characters

if TYPE_CHECKING:
    from ratchet.tuner.reports.report import Report, Row
    from ratchet.tuner.rollouts.prices import RolloutCost

COLUMNS = ("method", "technique", "score", "gain, 95% interval", "effect", "tokens", "time", "money", "serves now?")


def plain(report: Report) -> dict[str, Any]:
    """Return the report as JSON can hold it."""
    import msgspec

    content: dict[str, Any] = msgspec.to_builtins(report)
    return content


def cells(row: Row) -> tuple[str, ...]:
    """Return a method's line of the table, one text a column."""
    if row.tuning_id is None:
        return (row.label, "not run", *[""] * (len(COLUMNS) - 2))
    return (
        row.label,
        row.technique or "",
        *effect_cells(row),
        *cost_cells(row.spent, row.wall_seconds),
        _serves(row),
    )


def _serves(row: Row) -> str:
    if row.serves is not None:
        return row.serves
    return f"no longer {row.promoted}" if row.promoted else "not this"


def effect_cells(row: Row) -> tuple[str, str, str]:
    """Return the scores, the gain and what it says."""
    found = row.effect
    if found is None:
        return "", "", _without_effect(row)
    gain = "" if found.difference is None else f"{found.difference:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    return f"{number(found.before)} to {number(found.after)}", gain, f"{found.told} (n={found.tasks})"


def _without_effect(row: Row) -> str:
    """Return what a run found that has no gain to show."""
    if row.best is not None and row.best == row.baseline:
        return "stays as it is"
    if row.method == "prompt":
        return "nothing better found on validation"
    return "not measured" if row.promoted else "nothing better found"


def cost_cells(spent: RolloutCost | None, wall_seconds: float | None) -> tuple[str, str, str]:
    """Return tokens, time and money."""
    if spent is None:
        return "", "", ""
    tokens = f"{spent.prompt_tokens + spent.completion_tokens:,}"
    return tokens, duration(wall_seconds), spent.money.told()


def number(value: float | None) -> str:
    """Return a score with three digits; nothing of None."""
    return "" if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """Return seconds as people say them."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def heading(report: Report) -> str:
    """Return what was measured on what."""
    if report.task_set is None:
        return "no tuning run that can stand here has finished yet"
    used = report.task_set
    return f"{report.alias} on {used.tasks} tasks of {used.source} ({used.split}), judged by {report.judge}"


def footnotes(report: Report) -> list[str]:
    """Return what a reader must know beside the table."""
    lines = [f"{row.label}: run `{row.command}`" for row in report.rows if row.tuning_id is None]
    lines += [f"{row.label}: {note}" for row in report.rows for note in row.notes]
    return lines + [f"left out: {one.tuning_id} ({one.method}): {one.why}" for one in report.left_out]


def markdown(report: Report) -> str:
    """Return the report for a document."""
    lines = [strip_control_characters(heading(report)), "", _piped(COLUMNS), _piped(["---"] * len(COLUMNS))]
    lines += [_piped(cells(row)) for row in report.rows]
    notes = [f"- {strip_control_characters(note)}" for note in footnotes(report)]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _piped(texts: Any) -> str:
    return (
        "| " + " | ".join(" ".join(strip_control_characters(text).replace("|", "\\|").split()) for text in texts) + " |"
    )


def draw(report: Report, path: Path) -> None:
    """Draw every method's gain with its interval. Raises CliError where matplotlib is missing."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 3.2), dpi=120)
    rows = list(reversed(report.rows))
    for place, row in enumerate(rows):
        if row.effect is not None and row.effect.difference is not None:
            gain = row.effect
            reach = [[max(0.0, row.effect.difference - gain.low)], [max(0.0, gain.high - row.effect.difference)]]
            axes.errorbar([row.effect.difference], [place], xerr=reach, fmt="o", capsize=4, color="tab:blue")
        else:
            axes.text(0.0, place, " not measured", va="center", color="gray")
    axes.axvline(0.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set(xlabel="gain on held-out tasks, 95% interval", title=heading(report)[:110])
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def table(report: Report) -> Any:
    """Return the report as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(strip_control_characters(heading(report))), title_justify="left")
    for column in COLUMNS:
        drawn.add_column(column, overflow="fold")
    for row in report.rows:
        drawn.add_row(*(Text(strip_control_characters(cell)) for cell in cells(row)))
    return drawn


def show(report: Report) -> None:
    """Print the table and what belongs to it."""
    from ratchet.output.tables import printed

    printed(table(report), footnotes(report))


def run_line(tuning: Any, *, at_work: bool) -> str:
    """Return one line of the list of runs; `at_work`: a process has it."""
    under_way = "since then" if at_work else "cut off: no process works on it"
    how_long = duration(tuning.ended_at - tuning.started_at) if tuning.ended_at else under_way
    line = (
        f"{tuning.id}  {tuning.kind:<12} {tuning.state:<7} {tuning.alias}  {format_time(tuning.started_at)}  {how_long}"
    )
    return f"{line}  {tuning.error}" if tuning.error else line
