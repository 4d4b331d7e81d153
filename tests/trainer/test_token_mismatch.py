"""The learner reports the difference to vLLM's logprob for every trained token, however rows are packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.store.records import unpack_halves
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import build_rows


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_the_mismatch_of_a_row_is_trainer_minus_engine_at_its_trained_tokens(tiny_model: Path, steps: int) -> None:
    settings = LearnerSettings(
        learning_rate=1e-3, steps_per_round=steps, threads=1, token_budget=64, sequence_mask_threshold=1e9
    )
    learner = Learner(str(tiny_model), settings)
    rows = [replace(row, temperature=1.0) for row in build_rows(6, seed=3)]
    rows[2] = replace(rows[2], importance=False)
    scored = learner.score(rows)
    report = learner.train_round(rows)
    assert len(report.mismatch) == len(rows)
    for place, (row, logprobs, packed) in enumerate(zip(rows, scored, report.mismatch, strict=True)):
        known = zip(logprobs, row.logprobs, row.mask, strict=True)
        expected = [ours - theirs for ours, theirs, trained in known if trained]
        assert packed is not None
        assert unpack_halves(packed) == pytest.approx(() if place == 2 else expected, abs=0.01, rel=0.01)
    assert "mismatch" not in report.figures()
