"""How large a step a round takes, by how much it holds: with a learner that only notes it, and a real one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ratchet.settings.project_settings import Settings
from ratchet.status import next_round, next_round_line
from ratchet.store.records import Group
from ratchet.store.states import GroupState
from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.backlog import RoundSize
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.records import judged_group
from tests.harness.trainer.tiny import build_row, build_rows
from tests.trainer.test_backlog import backlog


class RecordingLearner:
    """A learner that only notes the rounds that it is given."""

    step = 0

    def __init__(self, unfit: Sequence[str] = ()) -> None:
        self.scales: list[float] = []
        self._unfit = unfit

    def unfit(self, row: TokenRow) -> str | None:
        return "another model's" if row.trajectory_id in self._unfit else None

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        self.scales.append(rate_scale)
        return RoundReport(0.0, 0.0, 0.0, 0.0, 1, len(rows), 1, 1, 0.0, 0.0, 0, 0.0, 0.0, 1.0)

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]:
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True)

    def load(self, folder: str | Path | None, settings: LearnerSettings) -> None:
        raise NotImplementedError


def group(members: int) -> Group:
    names = tuple(map(str, range(members)))
    return Group(
        id="g", key="k", alias="a", state=GroupState.JUDGED, formed_at=0.0, members=names, initial_size=members
    )


def test_many_small_rounds_add_as_much_noise_as_one_whole_round_of_the_same_samples() -> None:
    size = RoundSize(groups_per_round=16, num_generations=8)
    assert size.rate_scale([group(8)] * 16) == size.rate_scale([group(8)] * 40) == 1.0
    for count in (1, 2, 4, 8):
        rounds = 16 // count
        assert rounds * size.rate_scale([group(8)] * count) ** 2 == pytest.approx(1.0)
    assert size.rate_scale([group(1)]) == pytest.approx(math.sqrt(1 / 128))


def test_a_round_begins_whole_or_late_and_never_below_its_least(store: Store) -> None:
    waiting = backlog(store, round_wait_seconds=600.0, min_groups_per_round=2)
    assert [waiting.is_round_due(*case) for case in ((16.0, 0.0), (15.5, 599.0), (2.0, 600.0), (1.875, 1e9))] == [
        True, False, True, False,
    ]  # fmt: skip


def test_a_round_takes_the_step_that_its_trained_groups_are_worth(store: Store, tmp_path: Path) -> None:
    groups = [judged_group(store, [f"{task}1", f"{task}2"], [0.0, 1.0], task=task) for task in "abcd"]
    for one in groups:  # the judge has seen their calls
        verdicts = store.groups.verdicts(one.members).values()
        store.groups.replace_verdicts([msgspec.structs.replace(verdict, judged_at=10.0) for verdict in verdicts])
    learner = RecordingLearner(unfit=["d1", "d2"])
    runner = RoundRunner(store, "agent", tmp_path, size=RoundSize(groups_per_round=12, num_generations=2))
    candidate = runner.run_round(learner, groups, 0)
    assert candidate is not None
    assert learner.scales == [0.5]  # of three groups of twelve: the fourth held nothing to train
    assert store.rounds.get(candidate.round_id or "").metrics["rate_scale"] == 0.5


def test_a_scaled_round_moves_the_weights_less_and_leaves_the_rate_alone(tiny_model: Path) -> None:
    settings = LearnerSettings(learning_rate=1e-3, threads=1)
    whole, small = (Learner(str(tiny_model), settings) for name in "ab")
    rows = build_rows(6)
    moved = whole.train_round(rows).weight_change
    assert small.train_round(rows, 0.25).weight_change == pytest.approx(0.25 * moved, rel=1e-3)
    again = build_rows(6, seed=2)
    ratio = small.train_round(again).weight_change / whole.train_round(again).weight_change
    assert ratio == pytest.approx(1.0, rel=0.2)


def test_one_vote_does_not_move_the_policy_as_a_whole_round_does(tiny_model: Path) -> None:
    size = RoundSize(groups_per_round=2, num_generations=8)
    settings = LearnerSettings(learning_rate=1e-3, threads=1)
    one, many = (Learner(str(tiny_model), settings) for name in "ab")
    vote = one.train_round([build_row(1, advantage=1.0)], size.rate_scale([group(1)])).weight_change
    whole = many.train_round([replace(row, advantage=1.0) for row in build_rows(16)], size.rate_scale([group(8)] * 2))
    assert vote < 0.3 * whole.weight_change


def test_status_says_what_the_next_round_waits_for(store: Store) -> None:
    judged_group(store, ["a", "b"], [0.0, 1.0])
    settings = Settings(model="agent", trainer={"judge": "a:b", "groups_per_round": 12, "min_groups_per_round": 3})
    waits = next_round(store, settings)
    assert waits is not None
    assert next_round_line(waits) == "1 of 12 groups judged; it starts with fewer after 600 s, but with 3 at least"
