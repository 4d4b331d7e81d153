"""Claims about a learner that is put back to a checkpoint: in place, and as if it had been built there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_rows, build_tiny_model

SETTINGS = LearnerSettings(learning_rate=1e-3, steps_per_round=2, threads=1)
HIDDEN = 48  # a width that no other model of these tests has, to distinguish its weights


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("odd_model"), hidden=HIDDEN)


def train(learner: Learner, rounds: range) -> list[RoundReport]:
    return [replace(learner.train_round(build_rows(6, seed=number)), seconds=0.0) for number in rounds]


def state_of(learner: Learner, folder: Path) -> dict[str, bytes]:
    """All of a checkpoint that makes the next step what it is."""
    learner.save(folder)
    names = ("lora.safetensors", "optimizer.pt", "rng.pt")
    return {name: (folder / "learner" / name).read_bytes() for name in names}


def base_weights() -> Iterator[torch.Tensor]:
    """The embeddings of every odd model that is in memory, garbage that nothing collected yet included."""
    for found in gc.get_objects():
        if type(found) is torch.nn.Embedding and found.weight.shape[1] == HIDDEN:
            yield found.weight


@pytest.mark.slow
@pytest.mark.parametrize("rounds_before", [0, 2])
def test_what_is_loaded_in_place_is_bitwise_what_would_be_built_there(
    tiny_model: Path, tmp_path: Path, rounds_before: int
) -> None:
    def built(settings: LearnerSettings, resume_from: Path | None = None) -> Learner:
        return Learner(str(tiny_model), settings, resume_from=resume_from)

    learner = built(SETTINGS)
    checkpoint = None
    if rounds_before:
        train(learner, range(rounds_before))
        learner.save(checkpoint := tmp_path / "0001")
    train(learner, range(5, 8))  # what no commit stands for
    other = replace(SETTINGS, loss_type="sft", learning_rate=1e-2, beta=0.0, steps_per_round=3)
    penalised = replace(SETTINGS, loss_type="cispo", beta=0.1, learning_rate=3e-4)
    for number, settings in enumerate((SETTINGS, other, penalised, SETTINGS)):
        fresh = built(settings, checkpoint)
        assert fresh.step == 2 * rounds_before
        expected = train(fresh, range(8, 10)), state_of(fresh, tmp_path / f"fresh{number}")
        learner.load(checkpoint, settings)
        assert learner.step == 2 * rounds_before
        assert (train(learner, range(8, 10)), state_of(learner, tmp_path / f"ours{number}")) == expected


def test_a_setting_that_shapes_the_adapter_is_not_changed_in_place(tiny_model: Path) -> None:
    learner = Learner(str(tiny_model), SETTINGS)
    with pytest.raises(SettingError, match="lora_r cannot change"):
        learner.load(None, replace(SETTINGS, lora_r=4))


@pytest.mark.slow
def test_a_rejected_version_leaves_the_base_model_where_it_is_and_there_is_one(
    store: Store, make_controller: Callable[..., SteppedController], odd_model: Path
) -> None:
    controller = make_controller(base_model=str(odd_model), release={"policy": "immediate", "max_gain": 0.3})
    assert controller.learner.step == 0  # made when it is first needed
    (weights,) = base_weights()
    place = weights.data_ptr()
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    controller.step(1000.0)
    store.policies.roll_back_manually("agent", None, by="anna", reason="it is rude")
    agents_work(store, "c", [0.0, 1.0])
    agents_work(store, "d", [1.0, 0.0])
    controller.step(2000.0)
    assert [held.from_version for held in store.rounds.page("agent")] == [0, 0]
    (after,) = base_weights()
    assert after is weights
    assert after.data_ptr() == place
