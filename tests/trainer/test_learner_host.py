"""The host of a learner: many agents on one base model, put back to a checkpoint in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratchet.store.store import Store
from ratchet.trainer.errors import CheckpointDamaged, LearnerServiceError, NoLearningSignal, SettingError
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api import ModelLimits, RoundReport, unfit
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import VOCABULARY, build_row, build_rows, build_tiny_model

PROCESS = LearnerProcessSettings(threads=1, token_budget=256)
MAIL = LearnerSettings(learning_rate="auto", steps_per_round=2, lora_alpha=16)
SUPPORT = LearnerSettings(
    learning_rate=3e-3, loss_type="cispo", beta=0.1, steps_per_round=3, lora_alpha=32, seed=7, max_grad_norm=0.1
)
STATE = ("lora.safetensors", "optimizer.pt", "rng.pt")


@pytest.fixture
def host(tiny_model: Path) -> LearnerHost:
    return LearnerHost(str(tiny_model), PROCESS)


def train(host: LearnerHost, agent: str, number: int) -> RoundReport:
    return replace(host.train_round(agent, build_rows(6, seed=number)), seconds=0.0)


def state_of(host: LearnerHost, agent: str, folder: Path) -> dict[str, bytes]:
    """All of an agent's checkpoint that makes its next step what it is."""
    host.save(agent, folder)
    return {name: (folder / "learner" / name).read_bytes() for name in STATE}


@pytest.mark.slow
def test_agents_that_take_turns_learn_bitwise_what_each_learns_alone(
    tiny_model: Path, host: LearnerHost, tmp_path: Path
) -> None:
    alone = {}
    for agent, settings in (("mail", MAIL), ("support", SUPPORT)):
        own = LearnerHost(str(tiny_model), PROCESS)
        own.open(agent, settings, None)
        reports = [train(own, agent, number) for number in range(3)]
        alone[agent] = reports, state_of(own, agent, tmp_path / f"alone-{agent}")
    host.open("mail", MAIL, None)
    host.open("support", SUPPORT, None)
    together: dict[str, list[RoundReport]] = {"mail": [], "support": []}
    for number in range(3):
        for agent, reports in together.items():
            reports.append(train(host, agent, number))
    for agent, reports in together.items():
        assert (reports, state_of(host, agent, tmp_path / f"together-{agent}")) == alone[agent]


def test_an_agents_logprobs_are_bitwise_equal_before_and_after_the_round_of_another(host: LearnerHost) -> None:
    host.open("mail", MAIL, None)
    train(host, "mail", 1)
    host.open("support", SUPPORT, None)
    rows = build_rows(5, seed=9)
    before, base = host.score("mail", rows), host.score("mail", rows, adapter=False)
    moved = host.score("support", rows)
    assert train(host, "support", 2).weight_change > 0
    assert host.score("support", rows) != moved
    assert host.score("mail", rows) == before != base
    assert host.score("mail", rows, adapter=False) == base


def test_a_round_that_fails_does_not_touch_another_agent(host: LearnerHost) -> None:
    host.open("mail", MAIL, None)
    train(host, "mail", 1)
    rows = build_rows(5, seed=9)
    before = host.score("mail", rows)
    host.open("support", SUPPORT, None)
    with pytest.raises(NoLearningSignal):
        host.train_round("support", [])
    assert host.score("mail", rows) == before


def test_opening_again_takes_another_state_in_place_or_leaves_the_agents(host: LearnerHost, tmp_path: Path) -> None:
    host.open("mail", MAIL, None)
    train(host, "mail", 1)
    host.save("mail", tmp_path / "0001")
    rows, places = build_rows(3, seed=9), addresses(host)
    committed = host.score("mail", rows)
    train(host, "mail", 2)
    later = host.score("mail", rows)
    with pytest.raises(CheckpointDamaged):
        host.open("mail", MAIL, tmp_path / "absent")
    assert host.score("mail", rows) == later != committed
    assert host.open("mail", MAIL, tmp_path / "0001") == host.step("mail") == 2
    assert host.score("mail", rows) == committed
    assert addresses(host) == places


def addresses(host: LearnerHost) -> list[int]:
    """Where model, adapter and the optimizer's moments lie."""
    trainer = host.trainer
    moments = [slot["exp_avg"] for slot in trainer.optimizer.state.values()]
    return [tensor.data_ptr() for tensor in (*trainer.model.parameters(), *moments)]


def test_an_agent_cannot_have_another_adapter_shape_and_must_be_open(host: LearnerHost) -> None:
    with pytest.raises(SettingError, match="lora_r cannot change"):
        host.open("mail", replace(MAIL, lora_r=4), None)
    with pytest.raises(LearnerServiceError, match="no agent 'mail'"):
        host.score("mail", build_rows(1))
    host.open("mail", MAIL, None)
    host.close("mail")
    with pytest.raises(LearnerServiceError, match="no agent 'mail'"):
        host.train_round("mail", build_rows(1))


def test_unfit_rows_are_those_that_the_base_model_cannot_take(host: LearnerHost) -> None:
    assert host.limits == ModelLimits(vocabulary=VOCABULARY, max_positions=1024, caps_logits=False)
    row = build_row(1)
    assert unfit(host.limits, row) is None
    assert "outside the base model's 512 ids" in str(unfit(host.limits, replace(row, ids=(512, *row.ids[1:]))))
    long = replace(row, ids=row.ids * 100, mask=row.mask * 100, logprobs=row.logprobs * 100)
    assert "exceed the base model's 1024 positions" in str(unfit(host.limits, long))
    capped = replace(host.limits, caps_logits=True)
    assert unfit(capped, row) is None
    assert "temperature 0.7 cannot be applied" in str(unfit(capped, replace(row, temperature=0.7)))


def test_the_scale_of_an_adapter_is_its_own_agents(host: LearnerHost) -> None:
    """lora_alpha scales the change from the base model: twice of it is further away."""
    rows, moved = build_rows(4, seed=3), {}
    for alpha in (8, 64):
        host.open(f"agent{alpha}", replace(MAIL, lora_alpha=alpha, learning_rate=1e-3), None)
        train(host, f"agent{alpha}", 1)
    for alpha in (8, 64):
        scored = torch.cat([torch.tensor(row) for row in host.score(f"agent{alpha}", rows)])
        base = torch.cat([torch.tensor(row) for row in host.score(f"agent{alpha}", rows, adapter=False)])
        moved[alpha] = float((scored - base).norm())
    assert moved[64] > 2 * moved[8] > 0


SETTINGS = LearnerSettings(learning_rate=1e-3, steps_per_round=2, threads=1)
HIDDEN = 48  # a width that no other model of these tests has, to distinguish its weights


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("odd_model"), hidden=HIDDEN)


def train_one(learner: Learner, rounds: range) -> list[RoundReport]:
    return [replace(learner.train_round(build_rows(6, seed=number)), seconds=0.0) for number in rounds]


def whole_state(learner: Learner, folder: Path) -> dict[str, bytes]:
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
        train_one(learner, range(rounds_before))
        learner.save(checkpoint := tmp_path / "0001")
    train_one(learner, range(5, 8))  # what no commit stands for
    other = replace(SETTINGS, loss_type="sft", learning_rate=1e-2, beta=0.0, steps_per_round=3)
    penalised = replace(SETTINGS, loss_type="cispo", beta=0.1, learning_rate=3e-4)
    for number, settings in enumerate((SETTINGS, other, penalised, SETTINGS)):
        fresh = built(settings, checkpoint)
        assert fresh.step == 2 * rounds_before
        expected = train_one(fresh, range(8, 10)), whole_state(fresh, tmp_path / f"fresh{number}")
        learner.load(checkpoint, settings)
        assert learner.step == 2 * rounds_before
        assert (train_one(learner, range(8, 10)), whole_state(learner, tmp_path / f"ours{number}")) == expected


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
