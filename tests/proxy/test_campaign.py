"""A short durability campaign with both databases; `benchmarks/durability.py` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.durability.campaign import DurabilityOutcome, run
from tests.harness.postgres import postgres_server

pytestmark = pytest.mark.slow


def _kept(outcome: DurabilityOutcome) -> None:
    assert outcome.violations == []
    assert outcome.answered > 100
    assert outcome.stored["answered"] >= outcome.answered


def test_ten_kills_and_outages_of_sqlite_lose_and_duplicate_no_answered_call(tmp_path: Path) -> None:
    outcome = run(tmp_path, kills=10, outages=2, seconds=1.0)
    assert (sum(outcome.kills.values()), outcome.outages) == (10, {"locked": 1, "moved": 1})
    _kept(outcome)


@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_kills_and_a_killed_postgresql_lose_and_duplicate_no_answered_call(tmp_path: Path) -> None:
    with postgres_server() as server:
        outcome = run(tmp_path, kills=4, outages=1, seconds=2.0, server=server)
    assert outcome.outages == {"killed": 1}
    _kept(outcome)
