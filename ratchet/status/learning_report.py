"""`ratchet status --report`: is it learning? The trainer's report as text, JSON or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import CliError
from ratchet.output.plots import pyplot
from ratchet.settings import Settings

if TYPE_CHECKING:
    from ratchet.store.reports.learning_comparison import Gain, Side
    from ratchet.store.reports.learning_report import LearningReport


def read(settings: Settings) -> LearningReport:
    """Return the report on what the store holds. Raises CliError where there is no store yet."""
    from ratchet.store.reports.relative_judges import read_learning_report
    from ratchet.store.store import open_store

    if settings.store is None and not settings.state.store.exists():
        raise CliError("nothing has run yet: there is no store to report on")
    store = open_store(settings.store_url, create=False)
    try:
        return read_learning_report(store, settings.model)
    finally:
        store.close()


def lines(report: LearningReport) -> list[str]:
    """Return the report for people."""
    text = [
        f"  @{v.version:<5} {v.count:>6} scored   mean {v.mean:.3f}   95% {v.low:.3f} to {v.high:.3f}"
        for v in report.versions
    ]
    if report.missing:
        return ["is it learning?  not known yet: " + report.missing, *text]
    for family in report.families:
        before, after = family.before, family.after
        text.append(f"{family.family}: before {_window(before)}, after {_window(after)}: {_gain(family.gain)}")
        if family.same_tasks is not None:
            text.append(f"  on the {family.same_tasks.count} tasks that came under both: {_gain(family.same_tasks)}")
    text += [f"  {note}" for note in report.notes]
    return [f"is it learning?  {report.families[0].gain.verdict}", *text]


def draw(report: LearningReport, path: Path) -> None:
    """Draw the mean score by version with its intervals. Raises CliError where matplotlib is missing."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 4.5), dpi=120)
    shown = [version for version in report.versions if version.count > 1]
    reach = [[v.mean - v.low for v in shown], [v.high - v.mean for v in shown]]
    axes.errorbar([v.version for v in shown], [v.mean for v in shown], yerr=reach, fmt="o-", capsize=3)
    axes.set(xlabel="policy version", ylabel="mean score, 95% interval", title="Scores of real traffic by version")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def _window(window: Side) -> str:
    """Return a window of scores: its mean, and which versions it is of."""
    first, last = window.first_version, window.last_version
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    return f"{window.mean:.3f} ({versions}, {window.count} scores)"


def _gain(gain: Gain) -> str:
    return f"{gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) {gain.verdict}"
