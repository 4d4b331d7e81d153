"""A short hostile-client campaign; `benchmarks/hostile.py` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.hostile.campaign import run

pytestmark = pytest.mark.slow


def test_hostile_requests_cause_no_5xx_leak_no_data_of_another_key_and_lose_no_record(tmp_path: Path) -> None:
    outcome = run(tmp_path, requests=300)
    assert outcome.violations == []
    assert outcome.requests > 300
    assert outcome.recorded > 20
    assert {"400", "401", "404"} <= {status for found in outcome.statuses.values() for status in found}
    assert outcome.statuses["theirs"]["403"] >= 4
