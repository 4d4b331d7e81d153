"""Claims about agents that share one learner: isolated bit by bit, and swapped in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratchet.trainer.errors import CheckpointDamaged, LearnerServiceError, NoLearningSignal, SettingError
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api import ModelLimits, RoundReport, unfit
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.trainer.tiny import VOCABULARY, build_row, build_rows

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
