"""Progress: done of total, pace, time left, means with their own divisors; the same numbers wherever they are shown."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path

import pytest
from rich.console import Console

from ratchet.store.db.engine import connect
from ratchet.store.operation_records import JobProgress
from ratchet.store.store import Store, open_store
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.observability.progress import (
    PeriodicLines,
    PhaseBars,
    Progress,
    StoredProgress,
    format_log_line,
    watch_for_command,
)


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_metric_has_its_own_divisor() -> None:
    seen: list[JobProgress] = []
    phase = Progress(seen.append).begin("judging", 3)
    for row in ({"tokens": 35.0, "reward": 1.0}, {"tokens": 42.0}, {"tokens": 51.0, "reward": 0.0}):
        phase.add(**row)
    assert [round(one.means["tokens"], 2) for one in seen[1:]] == [35.0, 38.5, 42.67]
    assert seen[-1].means["reward"] == 0.5


def test_pace_and_time_left_come_from_what_is_done() -> None:
    clock = Clock()
    seen: list[JobProgress] = []
    phase = Progress(seen.append, clock=clock).begin("judging", 20)
    assert (seen[-1].seconds_per_item, seen[-1].eta_seconds) == (None, None)
    clock.now += 10
    phase.add(4, reward=0.5)
    assert (seen[-1].done, seen[-1].seconds_per_item, seen[-1].eta_seconds) == (4, 2.5, 40.0)
    assert format_log_line(seen[-1]) == "phase=judging done=4 total=20 seconds_per_item=2.5 eta_seconds=40 reward=0.5"


def test_off_the_terminal_long_work_is_a_line_now_and_then_and_short_work_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(PeriodicLines(interval=10.0), clock=clock)
    short = progress.begin("training", 2)
    short.add()
    short.end()
    assert caplog.messages == []
    long = progress.begin("training", 100)
    for _ in range(25):
        clock.now += 1
        long.add()
    long.end()
    assert [message.split(" seconds_per")[0] for message in caplog.messages] == [
        "event=progress phase=training done=10 total=100",
        "event=progress phase=training done=20 total=100",
        "event=progress phase=training done=25 total=100",
    ]


def test_a_command_off_the_terminal_tells_people_how_far_it_is_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    phase = Progress(watch_for_command(), clock=clock).begin("rollouts", 100)
    clock.now += 20
    phase.add(40, score=0.25)
    clock.now += 11
    phase.add(60)
    phase.end()
    assert capsys.readouterr().err.splitlines() == [
        "rollouts 40 of 100, 0.5 s each, 0:00:30 left, score 0.25",
        "rollouts 100 of 100, 0.31 s each, 0:00:00 left, score 0.25",
        "rollouts 100 of 100, 0.31 s each, score 0.25",
    ]


def test_a_bar_shows_done_total_and_means() -> None:
    terminal = io.StringIO()
    bars = PhaseBars(Console(file=terminal, force_terminal=True, width=120))
    phase = Progress(bars, clock=Clock()).begin("judging", 4)
    phase.add(3, tokens=35)
    bars._bars.refresh()
    shown = terminal.getvalue()
    phase.end()
    assert "judging" in shown
    assert "3/4" in shown
    assert "tokens=35" in shown


def test_prometheus_gets_the_same_numbers() -> None:
    clock = Clock()
    metrics = TrainerMetrics("agent")
    phase = Progress(metrics.progress, clock=clock).begin("judging", 20)
    clock.now += 10
    phase.add(4, reward=0.5)

    def metric(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"alias": "agent", "phase": "judging", **labels})

    assert metric("ratchet_progress_items_done") == 4
    assert metric("ratchet_progress_items") == 20
    assert metric("ratchet_progress_seconds_per_item") == 2.5
    assert metric("ratchet_progress_eta_seconds") == 40
    assert metric("ratchet_progress_mean", metric="reward") == 0.5


def test_watchers_are_notified_only_of_changes() -> None:
    seen: list[JobProgress] = []
    phase = Progress(seen.append).begin("gathering", 16)
    phase.at(3.5, 16)
    phase.at(3.5, 16)
    assert [progress.done for progress in seen] == [0, 3.5]


def test_threads_may_add_at_once() -> None:
    phase = Progress().begin("judging", 4000)

    def add() -> None:
        for _ in range(1000):
            phase.add(1, reward=1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (phase.snapshot().done, phase.snapshot().means) == (4000, {"reward": 1.0})


def test_the_same_numbers_stand_in_the_store_and_are_written_seldom(store: Store) -> None:
    clock = Clock()
    stored_progress = StoredProgress(store, interval=3.0, clock=clock)
    progress = Progress(stored_progress.watch("agent"), clock=clock)
    Progress(stored_progress.watch("other"), clock=clock).begin("judging", 1).end()
    phase = progress.begin("judging", 8)
    stored_progress.flush()
    for tokens in (35.0, 42.0, 51.0):
        clock.now += 1.5
        phase.add(tokens=tokens)
        stored_progress.flush()
    (stored,) = store.job_progress.all("agent")
    assert (stored.done, stored.total, stored.means["tokens"]) == (
        2,
        8,
        38.5,
    )  # the third came too soon after the second
    assert (stored.seconds_per_item, stored.eta_seconds) == (1.5, 9.0)
    phase.end()
    assert stored_progress.due_in == 1.5
    stored_progress.flush(now=True)
    assert stored_progress.due_in is None
    (stored,) = store.job_progress.all("agent")
    assert (stored.done, stored.ended, round(stored.means["tokens"], 2)) == (3, True, 42.67)


def test_a_store_that_is_away_does_not_end_the_work(tmp_path: Path) -> None:
    away = open_store(str(tmp_path / "store.db"))
    stored_progress = StoredProgress(away)
    progress = Progress(stored_progress.watch("agent"))
    with connect(str(tmp_path / "store.db")).begin() as connection:
        connection.exec_driver_sql("DROP TABLE job_progress")
    phase = progress.begin("training", 2)
    phase.add()
    phase.end()
    stored_progress.flush(now=True)
    away.close()
