"""Claims about how far a round moved the policy, and the rate of the next one that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_row, build_rows

SETTINGS = LearnerSettings(steps_per_round=2, threads=1)

LearnerMaker = Callable[..., Learner]


class Collapsing(Learner):
    """A learner whose first rounds make good answers less likely, as its report says; the third does not."""

    def train_round(self, rows: Sequence[TokenRow], *how: Any) -> RoundReport:
        found = super().train_round(rows, *how)
        return replace(found, logprob_change_positive_mean=-0.05 if found.step < 3 else 0.01)


@pytest.fixture
def make_learner(tiny_model: Path) -> LearnerMaker:
    def make(settings: LearnerSettings = SETTINGS, *, resume_from: Path | None = None) -> Learner:
        return Learner(str(tiny_model), settings, resume_from=resume_from)

    return make


def train(learner: Learner, rounds: range) -> list[RoundReport]:
    return [replace(learner.train_round(build_rows(6, seed=number)), seconds=0.0) for number in rounds]


@pytest.mark.slow
def test_a_rate_that_steers_itself_is_resumed_bit_for_bit(make_learner: LearnerMaker, tmp_path: Path) -> None:
    steady = make_learner()
    first, second = train(steady, range(2))
    assert second.learning_rate != first.learning_rate == 2e-3
    steady.save(tmp_path / "0001")
    expected = train(steady, range(2, 5))
    resumed = make_learner(resume_from=tmp_path / "0001")
    assert train(resumed, range(2, 5)) == expected
    for learner, name in ((resumed, "0002"), (steady, "0003")):
        learner.save(tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "learner" / "lora.safetensors") for name in ("0002", "0003"))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    steady.load(tmp_path / "0001", SETTINGS)  # a rollback, in place
    assert train(steady, range(2, 5)) == expected
    steady.load(None, SETTINGS)
    assert train(steady, range(2)) == [first, second]
    steady.load(None, replace(SETTINGS, loss_type="sft"))  # a warm start is not steered
    assert [report.learning_rate for report in train(steady, range(2))] == [2e-3, 2e-3]


def test_a_rate_set_by_hand_stays_whatever_the_rounds_move(make_learner: LearnerMaker, tmp_path: Path) -> None:
    steered = make_learner()
    train(steered, range(2))
    steered.save(tmp_path / "0001")
    fixed = make_learner(replace(SETTINGS, learning_rate=3e-5), resume_from=tmp_path / "0001")
    assert [report.learning_rate for report in train(fixed, range(3))] == [3e-5] * 3


@pytest.mark.parametrize("loss", ["dapo", "sft"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_movement_is_the_one_computed_by_hand(loss: str, steps: int, make_learner: LearnerMaker) -> None:
    learner = make_learner(
        replace(SETTINGS, loss_type=loss, steps_per_round=steps, learning_rate=1e-2, token_budget=64)
    )
    rows = [build_row(number, advantage=1.0 - number % 2 * (loss != "sft") * 2) for number in range(4)]
    before = learner.score(rows)
    report = learner.train_round(rows)
    pairs = zip(rows, before, learner.score(rows), strict=True)
    gaps = [
        (row.advantage, new - old)
        for row, olds, news in pairs
        for old, new, on in zip(olds, news, row.mask, strict=True)
        if on
    ]
    good = [gap for advantage, gap in gaps if advantage > 0]
    assert report.approx_kl_tokens == len(gaps)
    assert report.approx_kl == pytest.approx(sum(math.exp(g) - 1 - g for _, g in gaps) / len(gaps), rel=1e-2)
    assert report.logprob_change_abs_mean == pytest.approx(sum(abs(g) for _, g in gaps) / len(gaps), rel=1e-3)
    assert report.logprob_change_positive_mean == pytest.approx(sum(good) / len(good), rel=1e-3)
    assert report.approx_kl > 1e-5


@pytest.mark.slow
def test_a_round_that_makes_good_answers_less_likely_raises_an_alarm_until_one_does_not(
    store: Store, make_controller: Callable[..., SteppedController], tiny_model: Path, tmp_path: Path
) -> None:
    controller = make_controller(groups_per_round=9)
    runner = RoundRunner(store, "agent", tmp_path / "checkpoints")
    learner = Collapsing(str(tiny_model), replace(SETTINGS, steps_per_round=1))
    for version, names in enumerate((["collapse:agent"], ["collapse:agent"], [])):
        for task in "ab":
            agents_work(store, f"{task}{version}", [0.0, 1.0])
        controller.step(1000.0)
        runner.run_round(learner, store.groups.awaiting_round("agent"), version)
        assert [alarm.name for alarm in store.alarms.active()] == names
    (held, *_) = store.rounds.page("agent")
    assert held.metrics["approx_kl"] > 0
    assert held.metrics["learning_rate"] > 0
