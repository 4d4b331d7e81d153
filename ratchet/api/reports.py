"""Results of the tuner as text, Markdown and pictures: the report, a model selection, a learning curve, a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from ratchet.output import drawing, print_table, strip_control_characters
from ratchet.trainer.statistics import CandidateScore
from ratchet.tuner.reports import Row, TuningReport, TuningResult
from ratchet.tuner.rollouts.prices import RolloutCost
from ratchet.tuner.selection import Figures, Selection

COLUMNS = ("method", "technique", "score", "gain, 95% interval", "effect", "tokens", "time", "money", "serves now?")
_SELECTION_COLUMNS = (
    "candidate", "score, 95% interval", "against the first, p", "failed", "unjudged", "s p50", "s p95", "tokens each",
    "money each",
)  # fmt: skip
_CURVE = ("round", "split", "version", "rollouts", "mean", "95% interval", "against the baseline", "failed", "unjudged")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, *, right: bool) -> Table:
    """Return a table without control characters. `right`: align all columns but the first to the right."""
    drawn = Table(title=None if title is None else Text(strip_control_characters(title)), title_justify="left")
    for place, column in enumerate(columns):
        justify: Any = "right" if right and place else "left"
        drawn.add_column(strip_control_characters(column), justify=justify, overflow="fold")
    for cells in rows:
        drawn.add_row(*(Text(strip_control_characters(cell)) for cell in cells))
    return drawn


def number(value: float | None) -> str:
    """Return a score with three digits; nothing of None."""
    return "" if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """Return a duration with its unit."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _report_cells(row: Row) -> tuple[str, ...]:
    """Return a method's row of the table."""
    if row.tuning_id is None:
        return (row.label, "not run", *[""] * (len(COLUMNS) - 2))
    serves = row.serves or (f"no longer {row.promoted}" if row.promoted else "not this")
    technique = row.technique or ""
    return (row.label, technique, *effect_cells(row), *cost_cells(row.spent, row.wall_seconds), serves)


def effect_cells(row: Row) -> tuple[str, str, str]:
    """Return the scores, the gain and its meaning."""
    found = row.effect
    if found is not None:
        gain = "" if found.difference is None else f"{found.difference:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
        return f"{number(found.before)} to {number(found.after)}", gain, f"{found.description} (n={found.tasks})"
    if row.best is not None and row.best == row.baseline:
        return "", "", "unchanged"
    if row.method == "prompt":
        return "", "", "nothing better found on validation"
    return "", "", "not measured" if row.promoted else "nothing better found"


def cost_cells(spent: RolloutCost | None, wall_seconds: float | None) -> tuple[str, str, str]:
    if spent is None:
        return "", "", ""
    return f"{spent.prompt_tokens + spent.completion_tokens:,}", duration(wall_seconds), spent.money.describe()


def heading(report: TuningReport) -> str:
    """Return the title: alias, tasks and judge."""
    used = report.task_set
    if used is None:
        return "no tuning run has finished yet"
    return f"{report.alias} on {used.tasks} tasks of {used.source} ({used.split}), judged by {report.judge}"


def footnotes(report: TuningReport) -> list[str]:
    """Return the notes below the table."""
    lines = [f"{row.label}: run `{row.command}`" for row in report.rows if row.tuning_id is None]
    lines += [f"{row.label}: {note}" for row in report.rows for note in row.notes]
    return lines + [f"not compared: {one.tuning_id} ({one.method}): {one.why}" for one in report.excluded]


def markdown(report: TuningReport) -> str:
    """Return the report as Markdown."""
    lines = [strip_control_characters(heading(report)), "", _piped(COLUMNS), _piped(["---"] * len(COLUMNS))]
    lines += [_piped(_report_cells(row)) for row in report.rows]
    notes = [f"- {strip_control_characters(note)}" for note in footnotes(report)]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _piped(texts: Sequence[str]) -> str:
    cells = (" ".join(strip_control_characters(text).replace("|", "\\|").split()) for text in texts)
    return f"| {' | '.join(cells)} |"


def show_report(report: TuningReport) -> None:
    rows = [_report_cells(row) for row in report.rows]
    print_table(_table(COLUMNS, rows, heading(report), right=False), footnotes(report))


def draw_report(report: TuningReport, path: Path) -> None:
    """Draw each method's gain with its interval. Raises CliError."""
    rows = list(reversed(report.rows))
    with drawing(path, size=(8, 3.2)) as axes:
        for place, row in enumerate(rows):
            gain = row.effect
            if gain is not None and gain.difference is not None:
                bars = [[max(0.0, gain.difference - gain.low)], [max(0.0, gain.high - gain.difference)]]
                axes.errorbar([gain.difference], [place], xerr=bars, fmt="o", capsize=4, color="tab:blue")
            else:
                axes.text(0.0, place, " not measured", va="center", color="gray")
        axes.axvline(0.0, color="gray", linewidth=1)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(-0.5, len(rows) - 0.5)
        axes.set(xlabel="gain on held-out tasks, 95% interval", title=heading(report)[:110])
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3, axis="x")


def show_selection(selection: Selection, with_choice: bool = True, file: TextIO | None = None) -> None:
    """Print the candidates side by side, their commonest failures, and the choice."""
    pairs = zip(selection.ranking.scores, selection.figures, strict=True)
    drawn = _table(_SELECTION_COLUMNS, [_selection_cells(selection, *pair) for pair in pairs], right=True)
    chosen = f"chosen: {selection.chosen}" if selection.chosen else "none chosen"
    choice = [f"{chosen}: {selection.reason}"] if with_choice else []
    print_table(drawn, [*_selection_failures(selection), *choice], file=file)


def _selection_failures(selection: Selection) -> list[str]:
    """Return the commonest failures; candidates of which every rollout failed come first."""
    all_failed = [one for one in selection.figures if one.spent.rollouts and not one.ended]
    lines = [f"EVERY ROLLOUT OF {one.candidate} FAILED: {one.commonest_failure}" for one in all_failed]
    for one in selection.figures:
        if one.ended and one.commonest_failure:
            lines.append(f"{one.candidate} failed most often with {one.commonest_failure}")
        if one.commonest_judge_failure:
            lines.append(f"{one.candidate}: the judge failed most often with {one.commonest_judge_failure}")
    return lines


def _selection_cells(selection: Selection, scored: CandidateScore, figures: Figures) -> tuple[str, ...]:
    interval = f"({scored.low:.3f} to {scored.high:.3f})"
    tokens = figures.tokens_per_rollout
    money = figures.cost_per_rollout if tokens else None  # without tokens no call was recorded
    seconds = ("" if value is None else f"{value:.2f}" for value in (figures.seconds_p50, figures.seconds_p95))
    return (
        f"{scored.candidate} *" if scored.candidate == selection.chosen else scored.candidate,
        "not judged" if scored.mean is None else f"{scored.mean:.3f} {interval}",
        _against_first(selection, scored.candidate), str(scored.failed), str(scored.unjudged), *seconds,
        f"{tokens:,.0f}" if tokens else "unknown", "unknown" if money is None else f"{money:.3g}",
    )  # fmt: skip


def _against_first(selection: Selection, candidate: str) -> str:
    first = selection.ranking.scores[0].candidate
    if candidate == first:
        return ""
    pair = selection.ranking.pair(candidate, first)
    if pair.difference is None:
        return str(pair.verdict)
    return f"{pair.difference:+.3f} ({pair.low:+.3f} to {pair.high:+.3f}), {pair.p_value:.3g}: {pair.verdict}"


def draw_selection(selection: Selection, path: Path) -> None:
    """Draw each candidate's score with its interval and the cost of a rollout, in money or tokens. Raises CliError."""
    priced = any(one.cost_per_rollout is not None for one in selection.figures)
    names = []
    with drawing(path, 2, (9, 1.6 + 0.5 * len(selection.figures)), sharey=True) as (left, right):
        for row, (scored, figures) in enumerate(zip(selection.ranking.scores, selection.figures, strict=True)):
            names.append(scored.candidate + (" (chosen)" if scored.candidate == selection.chosen else ""))
            if scored.mean is not None:
                bars = [[max(0.0, scored.mean - scored.low)], [max(0.0, scored.high - scored.mean)]]
                left.errorbar([scored.mean], [row], xerr=bars, fmt="o", capsize=4, color="tab:blue")
            cost = figures.cost_per_rollout if priced else figures.tokens_per_rollout
            if cost is not None:
                right.barh([row], [cost], color="tab:gray", height=0.5)
            else:
                right.text(0.0, row, " price unknown", va="center", color="gray")
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.5, -0.5)
        left.set(xlabel="score, 95% interval")
        right.set(xlabel="money for a rollout" if priced else "tokens of a rollout")
        left.grid(alpha=0.3, axis="x")


def show_weights(result: TuningResult, file: TextIO | None = None) -> None:
    """Print the learning curve, the gain by task family and the verdict."""
    curve, tested = result.details["curve"], result.details.get("test", [])  # equal in runs without a validation split
    families = list(curve[0]["families"]) if curve else []
    several = families if len(families) > 1 else []
    title = f"Validation and test tasks ({result.task_set.tasks}), {result.attempts} attempts each"
    rows = [
        (*_curve_cells(result.alias, one), *(number(one["families"].get(name)) for name in several))
        for one in (curve if curve == tested else [*curve, *tested])
    ]
    print_table(_table((*_CURVE, *several), rows, title, right=False), _weights_lines(result), file=file)


def _curve_cells(alias: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    gain = one.get("against_baseline")
    return (
        str(one["round"]), str(one.get("split", "test")), f"{alias}@{one['version']}", str(one["rollouts"]),
        number(one["mean"]), f"{one['low']:.3f} to {one['high']:.3f}", "" if gain is None else _interval(gain),
        str(one["failed"]), str(one["unjudged"]),
    )  # fmt: skip


def _interval(gain: Mapping[str, Any]) -> str:
    if gain["difference"] is None:
        return "not judged"
    return f"{gain['difference']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})"


def _weights_lines(result: TuningResult) -> list[str]:
    """Return the notes, the gains and the verdict, one per line."""
    lines = [f"note: {note}" for note in result.notes]
    if (figures := result.details["warm_start"]) is not None:
        lines += _warm_start_lines(figures)
    families = result.details["families"]
    lines += [f"{name}: {_interval(gain)}" for name, gain in families.items() if len(families) > 1]
    if result.promoted is None:
        return [*lines, f"no gain: {result.baseline} still serves"]
    if result.gain is None:
        return [*lines, f"no figure: {result.promoted} serves, which the test tasks did not measure (`ratchet eval`)"]
    verdict = "better" if result.best is not None else "not shown to be better"
    return [*lines, f"{result.promoted} against {result.baseline}: {result.gain.describe()}: {verdict}"]


def _warm_start_lines(figures: Mapping[str, Any]) -> list[str]:
    sources = ", ".join(f"{name} {count}" for name, count in figures["by_source"].items())
    losses = " -> ".join(f"{loss:.4f}" for loss in figures["loss_by_epoch"])
    lines = [
        f"warm start: {figures['trajectories']} trajectories ({sources}) and {figures['general_rows']} general "
        f"conversations, loss {losses}"
    ]
    if figures["general_loss_before"] is not None:
        lines.append(
            f"general ability: loss {figures['general_loss_before']:.4f} -> {figures['general_loss_after']:.4f} nats a "
            f"token on {figures['general_held_out']} held-out rows"
        )
    if figures["skipped"]:
        lines.append("skipped: " + ", ".join(f"{why}: {count}" for why, count in figures["skipped"].items()))
    return lines


def draw_weights(result: TuningResult, path: Path) -> None:
    """Draw the mean of validation and test tasks with intervals, and the training reward. Raises CliError."""
    training: dict[str, list[tuple[int, float]]] = {}  # (round, mean reward) by family
    for row in result.details["training"]:
        training.setdefault(row["family"], []).append((row["round"], row["reward"]))
    with drawing(path) as axes:
        for name, points in training.items():
            axes.plot([x + 1 for x, _ in points], [y for _, y in points], alpha=0.5, label=f"training tasks: {name}")
        for name, form, color, label in (("curve", "o-", "tab:red", "validation"), ("test", "s", "tab:blue", "test")):
            measured = [one for one in result.details.get(name, []) if one["mean"] is not None]
            bars = [[one["mean"] - one["low"] for one in measured], [one["high"] - one["mean"] for one in measured]]
            axes.errorbar(
                [one["round"] for one in measured], [one["mean"] for one in measured], yerr=bars, fmt=form,
                color=color, capsize=4, label=f"{label} tasks, 95% interval",
            )  # fmt: skip
        axes.set(xlabel="rounds of training tasks", ylabel="score", title=f"{result.alias}: {result.technique}"[:110])
        axes.grid(alpha=0.3)
        axes.legend(loc="best")


def prompt_lines(run: str, result: TuningResult) -> list[str]:
    """Return the result of a prompt tuning as lines of text."""
    details, gain, budget = result.details, result.gain, result.details["budget"]
    lines = [f"{run}: {details['verdict']}: {details['why']}"]
    if gain is not None and gain.difference is not None:
        lines.append(
            f"held-out: {gain.against_mean:.3f} -> {gain.mean:.3f}, {gain.difference:+.3f} ({gain.low:+.3f} to "
            f"{gain.high:+.3f}, 95%) on {gain.tasks} tasks, p {gain.p_value:.3g}"
        )
    tokens = f"{budget['agent_tokens']:,} tokens of the agent and {budget['reflection_tokens']:,} of reflections"
    lines += [
        f"cost: {budget['rollouts_begun']} of {budget['rollouts']} rollouts, {tokens}",
        f"search: {len(details['validation'])} prompts; {details['search_ended_by']}",
        f"prompt ({details['mode']}, {details['prompt_id'] or 'unchanged'}):",
    ]
    return [*lines, *(f"  {line}" for line in details["prompt"].splitlines())]
