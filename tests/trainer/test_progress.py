"""Progress: done of total, pace, time left, means with their own divisors; the same numbers wherever they are shown."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from ratchet.store.db.engine import connect
from ratchet.store.store import Store, open_store
from ratchet.trainer.observability.metrics import Metrics
from ratchet.trainer.observability.progress import Bars, Lines, Progress, RunningMeans, Standing, format_for_terminal
from ratchet.trainer.observability.stored_progress import StoredProgress


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_metric_has_its_own_divisor() -> None:
    means = RunningMeans()
    shown = []
    for row in ({"tokens": 35.0, "reward": 1.0}, {"tokens": 42.0}, {"tokens": 51.0, "reward": 0.0}):
        means.add(row)
        shown.append(round(means.means()["tokens"], 2))
    assert shown == [35.0, 38.5, 42.67]
    assert means.means()["reward"] == 0.5


def test_pace_and_time_left_come_from_what_is_done() -> None:
    clock = Clock()
    seen: list[Standing] = []
    work = Progress(seen.append, clock=clock).begin("judging", 20)
    assert (seen[-1].seconds_per_item, seen[-1].eta_seconds) == (None, None)
    clock.now += 10
    work.add(4, reward=0.5)
    assert (seen[-1].done, seen[-1].seconds_per_item, seen[-1].eta_seconds) == (4, 2.5, 40.0)
    assert seen[-1].line() == "work=judging done=4 total=20 seconds_per_item=2.5 eta_seconds=40 reward=0.5"


def test_off_the_terminal_long_work_is_a_line_now_and_then_and_short_work_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(Lines(every=10.0), clock=clock)
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
        "event=progress work=training done=10 total=100",
        "event=progress work=training done=20 total=100",
        "event=progress work=training done=25 total=100",
    ]


def test_a_command_off_the_terminal_tells_people_how_far_it_is_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    work = Progress(format_for_terminal(), clock=clock).begin("rollouts", 100)
    clock.now += 20
    work.add(40, score=0.25)
    clock.now += 11
    work.add(60)
    work.end()
    assert capsys.readouterr().err.splitlines() == [
        "rollouts 40 of 100, 0.5 s each, 0:00:30 left, score 0.25",
        "rollouts 100 of 100, 0.31 s each, 0:00:00 left, score 0.25",
        "rollouts 100 of 100, 0.31 s each, score 0.25",
    ]


def test_a_bar_shows_done_total_pace_and_means(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bars = Bars()
    work = Progress(bars, clock=clock).begin("judging", 4)
    work.add(3, tokens=35)
    bars._bars["judging"].refresh()
    shown = capsys.readouterr().err
    work.end()
    assert "judging:  75%" in shown
    assert "3.0/4" in shown or "3/4" in shown
    assert "tokens=35" in shown


def test_prometheus_gets_the_same_numbers() -> None:
    clock = Clock()
    metrics = Metrics("agent")
    work = Progress(metrics.progress, clock=clock).begin("judging", 20)
    clock.now += 10
    work.add(4, reward=0.5)

    def told(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"alias": "agent", "work": "judging", **labels})

    assert told("ratchet_progress_items_done") == 4
    assert told("ratchet_progress_items") == 20
    assert told("ratchet_progress_seconds_per_item") == 2.5
    assert told("ratchet_progress_eta_seconds") == 40
    assert told("ratchet_progress_mean", metric="reward") == 0.5


def test_what_is_known_from_elsewhere_is_told_when_it_moves() -> None:
    seen: list[Standing] = []
    work = Progress(seen.append).begin("gathering", 16)
    work.at(3.5, 16)
    work.at(3.5, 16)
    assert [standing.done for standing in seen] == [0, 3.5]


def test_threads_may_add_at_once() -> None:
    work = Progress().begin("judging", 4000)

    def add() -> None:
        for _ in range(1000):
            work.add(1, reward=1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (work.standing().done, work.standing().means) == (4000, {"reward": 1.0})


def test_the_same_numbers_stand_in_the_store_and_are_written_seldom(store: Store) -> None:
    clock = Clock()
    standings = StoredProgress(store, "agent", every=3.0, clock=clock)
    progress = Progress(standings, clock=clock)
    work = progress.begin("judging", 8)
    for tokens in (35.0, 42.0, 51.0):
        clock.now += 1.5
        work.add(tokens=tokens)
    (told,) = store.job_progress.all("agent")
    assert (told.done, told.total, told.means["tokens"]) == (2, 8, 38.5)  # the third came too soon after the second
    assert (told.seconds_per_item, told.eta_seconds) == (1.5, 9.0)
    work.end()
    (told,) = store.job_progress.all()
    assert (told.done, told.ended, round(told.means["tokens"], 2)) == (3, True, 42.67)


def test_a_store_that_is_away_does_not_end_the_work(tmp_path: Path) -> None:
    away = open_store(str(tmp_path / "store.db"))
    progress = Progress(StoredProgress(away, "agent"))
    with connect(str(tmp_path / "store.db")).begin() as connection:
        connection.exec_driver_sql("DROP TABLE job_progress")
    work = progress.begin("training", 2)
    work.add()
    work.end()
    away.close()
