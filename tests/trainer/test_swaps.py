"""The swaps benchmark in short; `benchmarks/swaps.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.swaps.campaign import run

pytestmark = pytest.mark.slow


def test_swaps_under_load_fail_no_call_and_mix_no_versions(tmp_path: Path) -> None:
    outcome = run(tmp_path, swaps=6, pause=0.1, steady=1.0)
    assert outcome.failed == []
    assert (outcome.mixed_answers, outcome.mixed_trajectories) == (0, 0)
    assert outcome.calls > 30
    assert outcome.versions_seen >= 3
