"""The exactly-once campaign in short; `benchmarks/exactly_once.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.exactly_once.campaign import run
from tests.harness.exactly_once.processes import AGENTS
from tests.harness.postgres import postgres_server

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_kills_of_everything_train_nothing_twice_and_lose_nothing(tmp_path: Path) -> None:
    with postgres_server() as server:
        outcome = run(tmp_path, kills=7, server=server)
    assert outcome.violations == []
    assert len(outcome.kills) == 7
    assert outcome.read_back > 0
    assert outcome.trained >= outcome.answered - AGENTS  # each may have begun a task that it did not try again
    assert outcome.rounds["committed"] > 0
