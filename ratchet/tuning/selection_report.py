"""What `ratchet tune select-model` shows: candidates side by side, as a table, JSON or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.output.plots import pyplot
from ratchet.output.tables import printed, strip_control_characters

if TYPE_CHECKING:
    from ratchet.trainer.statistics.paired_comparison import Standing
    from ratchet.tuner.selection.choice import Figures, Selection

_COLUMNS = (
    "candidate", "score, 95% interval", "against the first, p", "failed", "unjudged", "s p50", "s p95", "tokens each",
    "money each",
)  # fmt: skip


def plain(selection: Selection) -> dict[str, Any]:
    """Return the selection as JSON can hold it."""
    import msgspec

    content: dict[str, Any] = msgspec.to_builtins(selection)
    for pair, told in zip(selection.ranking.pairs, content["ranking"]["pairs"], strict=True):
        told["verdict"] = str(pair.verdict)
    return content


def show(selection: Selection, with_choice: bool = True) -> None:
    """Print the table, who failed how, and the choice with its reason."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for column in _COLUMNS:
        drawn.add_column(column, justify="left" if column == "candidate" else "right", overflow="fold")
    for standing, figures in zip(selection.ranking.standings, selection.figures, strict=True):
        drawn.add_row(*(Text(strip_control_characters(cell)) for cell in _cells(selection, standing, figures)))
    printed(drawn, [*failures(selection), *([choice(selection)] if with_choice else [])])


def failures(selection: Selection) -> list[str]:
    """Return what failed most often; a candidate of which nothing worked comes first, and loudly."""
    hopeless = [one for one in selection.figures if one.spent.rollouts and not one.ended]
    said = [f"EVERY ROLLOUT OF {one.candidate} FAILED: {one.commonest_failure}" for one in hopeless]
    for one in selection.figures:
        if one.ended and one.commonest_failure:
            said.append(f"{one.candidate} failed most often with {one.commonest_failure}")
        if one.commonest_judge_failure:
            said.append(f"{one.candidate}: the judge failed most often with {one.commonest_judge_failure}")
    return said


def choice(selection: Selection) -> str:
    """Return what was chosen, and why."""
    told = f"chosen: {selection.chosen}" if selection.chosen else "none chosen"
    return f"{told}: {selection.reason}"


def draw(selection: Selection, path: Path) -> None:
    """Draw every candidate's score with its interval, and beside it what a rollout costs: money, or tokens."""
    plots = pyplot()
    priced = any(one.cost_per_rollout is not None for one in selection.figures)
    figure, (left, right) = plots.subplots(1, 2, figsize=(9, 1.6 + 0.5 * len(selection.figures)), dpi=120, sharey=True)
    names = []
    for place, (standing, figures) in enumerate(zip(selection.ranking.standings, selection.figures, strict=True)):
        names.append(standing.candidate + (" (chosen)" if standing.candidate == selection.chosen else ""))
        if standing.mean is not None:
            reach = [[max(0.0, standing.mean - standing.low)], [max(0.0, standing.high - standing.mean)]]
            left.errorbar([standing.mean], [place], xerr=reach, fmt="o", capsize=4, color="tab:blue")
        cost = figures.cost_per_rollout if priced else figures.tokens_per_rollout
        if cost is not None:
            right.barh([place], [cost], color="tab:gray", height=0.5)
        else:
            right.text(0.0, place, " price unknown", va="center", color="gray")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set(xlabel="score, 95% interval")
    right.set(xlabel="money for a rollout" if priced else "tokens of a rollout")
    left.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def _cells(selection: Selection, standing: Standing, figures: Figures) -> tuple[str, ...]:
    interval = f"({standing.low:.3f} to {standing.high:.3f})"
    money, tokens = figures.cost_per_rollout, figures.tokens_per_rollout
    return (
        f"{standing.candidate} *" if standing.candidate == selection.chosen else standing.candidate,
        "not judged" if standing.mean is None else f"{standing.mean:.3f} {interval}",
        _against_first(selection, standing.candidate),
        str(standing.failed), str(standing.unjudged), _seconds(figures.seconds_p50), _seconds(figures.seconds_p95),
        "" if tokens is None else f"{tokens:,.0f}", "unknown" if money is None else f"{money:.3g}",
    )  # fmt: skip


def _against_first(selection: Selection, candidate: str) -> str:
    first = selection.ranking.standings[0].candidate
    if candidate == first:
        return ""
    pair = selection.ranking.pair(candidate, first)
    if pair.difference is None:
        return str(pair.verdict)
    return f"{pair.difference:+.3f} ({pair.low:+.3f} to {pair.high:+.3f}), {pair.p_value:.3g}: {pair.verdict}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
