"""`ratchet status --report` and `--tensorboard`: the learning report, and what the store holds of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ratchet import options
from ratchet.errors import CliError
from ratchet.output.files import pyplot
from ratchet.output.terminal import strip_control_characters

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.reports.learning_report import Gain, LearningReport, Side
    from ratchet.store.store import Store

_TOOL_VERSIONS = 5  # newest ones with tool calls


@contextmanager
def _existing_store(settings: Settings) -> Iterator[Store]:
    if settings.store is None and not settings.state.store.exists():
        raise CliError("nothing has run yet: there is no store to report on")
    with options.open_store_for_command(settings.store_url) as store:
        yield store


def read_report(settings: Settings) -> LearningReport:
    """Return the learning report of the project's alias. Raises CliError if there is no store yet."""
    from ratchet.store.reports.learning_report import read_learning_report

    with _existing_store(settings) as store:
        return read_learning_report(store, settings.model)


def read_tools(settings: Settings) -> list[dict[str, Any]]:
    """Return how each of the newest versions of the project's alias uses each tool, newest version first."""
    with _existing_store(settings) as store:
        used = [one for one in store.behavior.by_version(settings.model) if one.tools][-_TOOL_VERSIONS:]
    return [{"version": one.version, **msgspec.to_builtins(tool)} for one in reversed(used) for tool in one.tools]


def tool_lines(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what `read_tools` returned as lines of text."""
    if not tools:
        return []
    text = ["tools: calls per trajectory, and the time until the result (median, 95th percentile)"]
    for one in tools:
        name, time = strip_control_characters(one["tool"]), one["seconds"]
        waited = f"{time['p50']:.2f} s, {time['p95']:.2f} s (n {time['count']})" if time else "no results"
        text.append(f"  @{one['version']:<5} {name:<24} {one['per_trajectory']:6.2f}   {waited}")
    return text


def report_lines(report: LearningReport) -> list[str]:
    """Return the report as lines of text: unproven versions first, then the answer."""
    first = [report.unproven] if report.unproven else []
    text = [
        f"  @{v.version:<5} {v.count:>6} scored   mean {v.mean:.3f}   95% {v.low:.3f} to {v.high:.3f}"
        for v in report.versions
    ]
    if report.missing:
        return [*first, f"is it learning?  not known yet: {report.missing}", *text]
    for family in report.families:
        before, after = family.before, family.after
        text.append(f"{family.family}: before {_window(before)}, after {_window(after)}: {_gain(family.gain)}")
        if family.same_tasks is not None:
            text.append(f"  on the {family.same_tasks.count} tasks seen by both: {_gain(family.same_tasks)}")
    text += [f"  {note}" for note in report.notes]
    return [*first, f"is it learning?  {report.families[0].gain.verdict}", *text]


def save_report_plot(report: LearningReport, path: Path) -> None:
    """Plot the mean score by version with its intervals. Raises CliError if matplotlib is missing."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 4.5), dpi=120)
    versions = [version for version in report.versions if version.count > 1]
    errors = [[v.mean - v.low for v in versions], [v.high - v.mean for v in versions]]
    axes.errorbar([v.version for v in versions], [v.mean for v in versions], yerr=errors, fmt="o-", capsize=3)
    axes.set(xlabel="policy version", ylabel="mean score, 95% interval", title="Scores of live traffic by version")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def _window(window: Side) -> str:
    """Describe a window of scores: its mean and its versions."""
    first, last = window.first_version, window.last_version
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    return f"{window.mean:.3f} ({versions}, {window.count} scores)"


def _gain(gain: Gain) -> str:
    return f"{gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) {gain.verdict}"


def write_tensorboard(settings: Settings, folder: Path) -> int:
    """Write every round and decision of the project's alias into a new folder; return the number of points.

    Raises CliError if there is no store yet or the folder is not empty, SettingError without tensorboard.
    """
    from ratchet.trainer.observability.monitors import check_installed, open_monitor, replay

    check_installed(["tensorboard"])
    if folder.exists() and any(folder.iterdir()):
        raise CliError(f"{folder} is not empty, and TensorBoard would draw both runs together: name a new folder")
    with _existing_store(settings) as store:
        monitor = open_monitor("tensorboard", folder, settings.model)
        try:
            count = replay(store, settings.model, monitor)
        finally:
            monitor.close()
    if not count:
        raise CliError(f"the store holds no round and no decision of {settings.model}: set `model`")
    return count
