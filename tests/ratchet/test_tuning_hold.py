"""Who has a run of the tuner, and how its end is written down: by all methods alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ratchet.api.run_lease import RunLease
from ratchet.store.errors import InvalidTransition, StoreUnavailable
from ratchet.store.operation_records import Tuning
from ratchet.store.states import TuningState
from ratchet.store.store import Store, open_store
from ratchet.store.tuning import Tunings
from ratchet.trainer.errors import TrainerError
from tests.harness.cli.project import ROOT, Project


class AwayAtTheEnd(Tunings):
    """The runs of a store that is away once one has begun."""

    def __init__(self, store: Store) -> None:
        super().__init__(store._engine)
        self.calls = 0

    def get(self, tuning_id: str) -> Tuning:
        self.calls += 1
        if self.calls > 2:
            raise StoreUnavailable("scripted outage")
        return super().get(tuning_id)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(str(tmp_path / "s.db"))
    yield opened
    opened.close()


@pytest.fixture
def run(store: Store) -> str:
    return store.tunings.begin("weights", "policy", {}).id


def test_what_ended_a_run_is_written_down_and_raised_and_the_run_is_free(
    store: Store, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="first"), RunLease(store).acquire(run):
        raise ValueError("first")
    ended = store.tunings.get(run)
    assert (ended.state, ended.error) == (TuningState.FAILED, "ValueError: first")
    assert f"`ratchet tune weights --resume {run}` resumes it" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), RunLease(store).acquire(run, resume=True, resumable=False):
        raise KeyboardInterrupt
    assert (store.tunings.get(run).state, store.tunings.get(run).error) == (TuningState.STOPPED, None)
    assert "--resume" not in capsys.readouterr().err


def test_a_store_that_is_away_does_not_hide_what_ended_the_run(
    store: Store, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store.tunings = AwayAtTheEnd(store)
    with pytest.raises(ValueError, match="first"), RunLease(store).acquire(run):
        raise ValueError("first")
    assert f"the end of {run} could not be stored: scripted outage" in capsys.readouterr().err


def test_an_end_that_is_known_stays(store: Store, run: str) -> None:
    with pytest.raises(ValueError, match="later"), RunLease(store).acquire(run):  # noqa: PT012
        store.tunings.end(run, "failed", error="warm start: too little")
        raise ValueError("later")
    assert store.tunings.get(run).error == "warm start: too little"
    done = store.tunings.begin("eval", "policy", {}).id
    store.tunings.end(done, "done")
    with pytest.raises(InvalidTransition, match="is done"), RunLease(store).acquire(done, resume=True):
        pass


@pytest.mark.slow
def test_a_process_that_lost_its_run_begins_nothing_more_and_writes_no_end(
    store: Store, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = RunLease(store)
    hold.check()
    with pytest.raises(TrainerError, match="another process took the lease"), hold.acquire(run):  # noqa: PT012
        hold.check()
        (held,) = store.leases.holders("tuning:")
        store.leases.release(held.name, held.owner)
        assert store.leases.acquire(held.name, "thief", 60.0)
        while True:
            hold.check()
    assert store.tunings.get(run).state is TuningState.RUNNING
    assert f"another process resumed {run}" in capsys.readouterr().err


HOLDER = """
import sys
from ratchet.api.run_lease import RunLease
from ratchet.store.store import open_store
store = open_store("sqlite:///s.db")
with RunLease(store).acquire(sys.argv[1]):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_that_is_under_way_is_refused_and_taken_over_once_its_process_is_dead(project: Project) -> None:
    store = open_store(str(project.folder / "s.db"))
    run = store.tunings.begin("weights", "policy", {}).id
    with _holding(project, run) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "has it\n"
        with _holding(project, run) as second:
            output, _ = second.communicate(timeout=120)
        assert f"TrainerError: tuning:{run} is held by process {first.pid} on " in output
        assert ", since 20" in output
        first.kill()
        first.communicate(timeout=120)
    with RunLease(store).acquire(run, resume=True) as taken:
        assert taken.id == run
    store.close()


@contextmanager
def _holding(project: Project, run: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, run], cwd=project.folder, env=environ, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
