"""One short end-to-end run on the real vLLM, for `make test`: traffic is recorded, judged, trained and served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cli.one_round import train_one_round
from tests.harness.cli.project import Project

_JUDGE = "def judge(response):\n    return sum(map(ord, response)) % 997 / 997\n"  # differs between any two answers


@pytest.mark.circle
@pytest.mark.e2e
def test_an_agents_calls_become_a_trained_version_that_answers_its_next_calls(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(_JUDGE)
    train_one_round(Project(tmp_path), "scores:judge")
