"""`ratchet tune weights`: its result as tables and as a learning curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.output.plots import pyplot
from ratchet.output.tables import strip_control_characters
from ratchet.tuning.tuning_report import number

if TYPE_CHECKING:
    from ratchet.tuner.reports.tuning_result import TuningResult

_CURVE = ("round", "split", "version", "rollouts", "mean", "95% interval", "against the baseline", "failed", "unjudged")


def show(result: TuningResult) -> None:
    """Print the curve, the families and the verdict."""
    from rich.table import Table

    from ratchet.output.tables import printed

    families = list(result.details["curve"][0]["families"]) if result.details["curve"] else []
    several = families if len(families) > 1 else []
    title = f"Validation and test tasks ({result.task_set.tasks}), {result.attempts} attempts each"
    drawn = Table(title=title, title_justify="left")
    for column in (*_CURVE, *several):
        drawn.add_column(strip_control_characters(column))
    curve, tested = result.details["curve"], result.details.get("test", [])  # of an old run one and the same
    for one in curve if curve == tested else [*curve, *tested]:
        means = [number(one["families"].get(name)) for name in several]
        drawn.add_row(*_cells(result.alias, one), *means)
    printed(drawn, lines(result))


def lines(result: TuningResult) -> list[str]:
    """Return what is said beneath the table."""
    said = [f"note: {strip_control_characters(note)}" for note in result.notes]
    if (story := result.details["warm_start"]) is not None:
        said += warm_start_lines(story)
    for name, gain in result.details["families"].items() if len(result.details["families"]) > 1 else ():
        said.append(f"{strip_control_characters(name)}: {_told(gain)}")
    if result.gain is None:
        return [*said, f"nothing was gained: {result.baseline} serves as before"]
    verdict = "better" if result.best is not None else "not shown to be better"
    return [*said, f"{result.promoted} against {result.baseline}: {result.gain.told()}: {verdict}"]


def warm_start_lines(story: Mapping[str, Any]) -> list[str]:
    """Return what a warm start did."""
    sources = ", ".join(f"{name} {count}" for name, count in story["by_source"].items())
    losses = " -> ".join(f"{loss:.4f}" for loss in story["loss_by_epoch"])
    said = [
        f"warm start: {story['trajectories']} trajectories ({sources}) and {story['general_rows']} general "
        f"conversations, loss {losses}"
    ]
    if story["general_loss_before"] is not None:
        said.append(
            f"general ability: loss {story['general_loss_before']:.4f} -> {story['general_loss_after']:.4f} nats a "
            f"token on {story['general_held_out']} held-out rows"
        )
    if story["left_out"]:
        said.append(
            "left out: "
            + ", ".join(f"{strip_control_characters(why)}: {count}" for why, count in story["left_out"].items())
        )
    return said


def draw(result: TuningResult, path: Path) -> None:
    """Draw the validation tasks' mean over the rounds, with intervals, the test tasks' at both ends, and the training
    reward. Raises CliError."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 4.5), dpi=120)
    for name, points in _training(result.details["training"]).items():
        axes.plot([x + 1 for x, _ in points], [y for _, y in points], alpha=0.5, label=f"training tasks: {name}")
    for name, form, colour, label in (("curve", "o-", "tab:red", "validation"), ("test", "s", "tab:blue", "test")):
        shown = [one for one in result.details.get(name, []) if one["mean"] is not None]
        reach = [[one["mean"] - one["low"] for one in shown], [one["high"] - one["mean"] for one in shown]]
        axes.errorbar(
            [one["round"] for one in shown], [one["mean"] for one in shown], yerr=reach, fmt=form, color=colour,
            capsize=4, label=f"{label} tasks, 95% interval",
        )  # fmt: skip
    axes.set(xlabel="rounds of training tasks", ylabel="score", title=f"{result.alias}: {result.technique}"[:110])
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def _training(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the points (round, mean reward) by family."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append((row["round"], row["reward"]))
    return found


def _cells(alias: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    gain = one.get("against_baseline")
    return (
        str(one["round"]), str(one.get("split", "test")), f"{alias}@{one['version']}", str(one["rollouts"]),
        number(one["mean"]), f"{one['low']:.3f} to {one['high']:.3f}", "" if gain is None else _told(gain),
        str(one["failed"]), str(one["unjudged"]),
    )  # fmt: skip


def _told(gain: Mapping[str, Any]) -> str:
    if gain["difference"] is None:
        return "not judged"
    return f"{gain['difference']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})"
