"""The exactly-once campaign in short; `benchmarks/exactly_once.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.databases import postgres_server
from benchmarks.exactly_once import run
from benchmarks.school_parts import AGENTS


@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_kills_of_everything_train_nothing_twice_and_lose_nothing(tmp_path: Path) -> None:
    with postgres_server() as server:
        outcome = run(tmp_path, kills=6, server=server)
    assert outcome.violations == []
    assert len(outcome.kills) == 5
    assert outcome.trained >= outcome.answered - AGENTS  # each may have begun a task that it did not try again
    assert outcome.rounds["committed"] > 0
