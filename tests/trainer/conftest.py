"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratchet.store.store import Store, open_store
from tests.harness.trainer import judge_samples
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.tiny import build_tiny_model

if TYPE_CHECKING:
    from tests.harness.trainer.stepped_controller import SteppedController


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model; never written to."""
    import torch

    # One thread: the operations are so small that on a busy machine a second one is only waited for, 50 times as long.
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    opened = open_store(str(store_file))
    opened.policies.register_base("agent", "base")
    judge_samples.by_answer.clear()
    yield opened
    opened.close()


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine(lambda name, ids: 0.0)
    yield made
    made.close()


@pytest.fixture
def make_controller(
    store: Store, engine: ScriptedEngine, tiny_model: Path, tmp_path: Path
) -> Iterator[Callable[..., SteppedController]]:
    from ratchet.trainer.settings.learner_settings import LearnerSettings
    from ratchet.trainer.settings.trainer_settings import TrainerSettings
    from tests.harness.trainer.stepped_controller import SteppedController

    made: list[SteppedController] = []

    def make(**changes: Any) -> SteppedController:
        values: dict[str, Any] = {
            "store": str(tmp_path / "store.db"),
            "model": "agent",
            "base_model": str(tiny_model),
            "vllm": (engine.url,),
            "checkpoints": tmp_path / "checkpoints",
            "judge": "tests.harness.trainer.judge_samples:scripted",
            "num_generations": 2,
            "groups_per_round": 2,
            "learner": LearnerSettings(learning_rate=1e-2, sequence_mask_threshold=None),
            "release": {"policy": "immediate"},
        }
        controller = SteppedController(TrainerSettings(**(values | changes)), store)
        made.append(controller)

        engine.scorer = Faithful(engine, lambda: controller.learner)
        return controller

    yield make
    for controller in made:
        controller.close()
