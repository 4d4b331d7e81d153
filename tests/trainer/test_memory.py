"""A round that does not fit into memory is made smaller until it does, and no single row stops the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Verdict
from ratchet.store.states import RoundState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.errors import OutOfMemory
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.observability.progress import PhaseProgress, Progress
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_rows
from tests.trainer.test_learning_rate import RecordingLearner


class Cramped(RecordingLearner):
    """A learner with memory for `capacity` padded tokens at once."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.budget = LearnerSettings().token_budget
        self.trained: list[list[int]] = []

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        lengths = [len(row.ids) for row in rows]
        batches = split_by_budget(lengths, self.budget)
        if max(len(batch) * max(lengths[index] for index in batch) for batch in batches) > self.capacity:
            raise OutOfMemory("no memory for a round")
        self.trained.append(sorted(lengths))
        return super().train_round(rows, rate_scale)

    def load(self, folder: str | Path | None, settings: LearnerSettings) -> None:
        self.budget = settings.token_budget


@pytest.fixture
def make_cramped(store: Store, engine: ScriptedEngine, tmp_path: Path) -> Iterator[Callable[..., SteppedController]]:
    made: list[SteppedController] = []

    def make(cramped: Cramped, **changes: Any) -> SteppedController:
        values: dict[str, Any] = {
            "store": "s", "model": "agent", "base_model": "b", "vllm": (engine.url,), "judge": {"kind": "workflow"},
            "checkpoints": tmp_path / "checkpoints", "num_generations": 2, "groups_per_round": 1,
            "release": {"policy": "immediate"},
        }  # fmt: skip
        settings = TrainerSettings(**(values | changes))
        controller = SteppedController(settings, store, learner_factory=lambda given, folder: cramped)
        made.append(controller)
        controller._release.controller.check(0.0)
        return controller

    yield make
    for controller in made:
        controller.close()


def judged(store: Store, task: str, lengths: Sequence[int]) -> list[str]:
    """One judged group of one-call trajectories whose rows have these lengths."""
    names = [
        agents_work(store, f"{task}{place}", [0.0], prompt=(5,) * (length - 3))[0]
        for place, length in enumerate(lengths)
    ]
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", names, now=101.0)
    store.groups.record_verdicts(
        group.id,
        [
            Verdict(
                trajectory_id=name, group_id=group.id, judge="j", judge_version="1", score=place % 2, judged_at=10.0
            )
            for place, name in enumerate(names)
        ],
    )
    return names


def states(store: Store, names: Sequence[str]) -> list[TrajectoryState]:
    return [store.trajectories.get(name).state for name in names]


def test_smaller_micro_batches_are_tried_first_and_cost_no_row(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    names = judged(store, "a", [100, 100, 100, 100])
    learner = Cramped(capacity=250)
    controller = make_cramped(learner, learner=LearnerSettings(token_budget=800))
    assert [controller._train(1000.0), controller._train(1001.0)] == [True, True]
    assert learner.trained == [[100] * 4]
    assert set(states(store, names)) == {TrajectoryState.TRAINED}
    assert [held.state for held in store.rounds.page("agent")] == [RoundState.COMMITTED, RoundState.ABANDONED]


def test_the_row_that_does_not_fit_alone_is_left_out_and_the_round_goes_on(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    names = judged(store, "a", [20, 30, 25, 900])
    learner = Cramped(capacity=100)
    controller = make_cramped(learner)
    for turn in range(4):
        assert controller._train(1000.0 + turn)
    assert learner.trained == [[20, 25, 30]]
    assert states(store, names) == [TrajectoryState.TRAINED] * 3 + [TrajectoryState.DROPPED]
    assert store.trajectories.get(names[3]).drop_reason == "too_long"
    (committed, *_) = store.rounds.page("agent")
    assert committed.metrics["untrained_tokens"] == {"too_long": 3}
    (alarm,) = (one for one in store.alarms.active() if one.name == "too_long:agent")
    assert "more than 899 tokens" in alarm.reason
    assert "max_length" in alarm.reason


def test_what_was_learnt_of_the_memory_outlives_the_trainer(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    judged(store, "a", [20, 30, 25, 900])
    learner = Cramped(capacity=100)
    for _ in range(4):  # each start is killed after its first try
        make_cramped(learner)._train(1000.0)
    assert learner.trained == [[20, 25, 30]]


def test_where_nothing_fits_the_trainer_stops_and_its_groups_wait(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    judged(store, "a", [200, 200, 200, 200])
    controller = make_cramped(Cramped(capacity=10))
    assert [controller._train(1000.0 + turn) for turn in range(4)] == [True] * 4
    with pytest.raises(OutOfMemory, match=r"none of the 4 rows .* 200 tokens"):
        controller._train(1004.0)
    assert len(store.groups.awaiting_round("agent")) == 1
    assert store.trajectories.drop_counts() == {}


def test_a_configured_max_length_needs_no_failed_rounds(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    names = judged(store, "a", [20, 30, 25, 900])
    learner = Cramped(capacity=10_000)
    make_cramped(learner, learner=LearnerSettings(max_length=100))._train(1000.0)
    assert learner.trained == [[20, 25, 30]]
    assert store.trajectories.get(names[3]).drop_reason == "too_long"


def test_a_round_that_ran_out_of_memory_leaves_no_gradient_to_the_next(tiny_model: Path) -> None:
    settings = LearnerSettings(learning_rate=1e-3, token_budget=64, threads=1)
    rows = build_rows(6)
    fresh, other = (Learner(str(tiny_model), settings) for name in "ab")
    expected = fresh.train_round(rows)

    def meet_the_end(progress: PhaseProgress) -> None:
        if progress.done > 1 and not progress.ended:
            raise RuntimeError("CUDA out of memory")

    other.report_progress_to(Progress(meet_the_end))
    with pytest.raises(OutOfMemory):
        other.train_round(rows)
    other.report_progress_to(Progress())
    again = other.train_round(rows)
    assert (again.loss, again.grad_norm, again.weight_change) == (
        expected.loss, expected.grad_norm, expected.weight_change,
    )  # fmt: skip
