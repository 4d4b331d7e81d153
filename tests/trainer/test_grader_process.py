"""The process of a foreign grader, scripted: whatever becomes of it, verdicts are failures and nothing is raised."""

from __future__ import annotations

from pathlib import Path

from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from tests.trainer.test_ruler import member

DESCRIPTION = '{"parameters": [], "needed": [], "mode": "pointwise", "source": "x"}'


def test_an_answer_that_is_cut_off_is_a_failure(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nread request\necho '{DESCRIPTION}'\nread request\nprintf '{{\"opinions\": [{{\"sco'\n"
    )
    python.chmod(0o700)
    judge = make_judge(read_spec({"kind": "openjudge", "grader": "any:Grader", "python": str(python)}), {})
    try:
        verdicts = judge.judge(None, [member("a", []), member("b", [])]).verdicts
    finally:
        judge.close()
    assert [verdict.score for verdict in verdicts] == [None, None]
    assert all("the grader's process exited" in str(verdict.failure) for verdict in verdicts)
