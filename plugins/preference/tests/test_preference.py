"""Preferences: the gradient is that of the formulas, and answers that are preferred become likelier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from ratchet.store.store import Store
from ratchet.trainer.errors import NoLearningSignal, SettingError
from ratchet.trainer.learner.training_round import preference_gaps
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.objectives import Preference, find_objective
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_row
from tests.trainer.test_loss_contract import Computed, backward, disturb, double, reference_logprobs

BETA = 0.3


def build_groups() -> list[TokenRow]:
    """Two groups of three trajectories; the second one's are of two rows each."""
    rows = []
    for group, (first, scores) in {"g1": (10, (0.5, -1.0, 0.2)), "g2": (20, (-0.2, 0.1, 0.3))}.items():
        for number, score in enumerate(scores):
            for part in range(1 if group == "g1" else 2):
                row = build_row(first + 3 * part + number, advantage=score)
                rows.append(dataclasses.replace(row, trajectory_id=f"{group}-{number}", group=group))
    return rows


def build_learner(loss: str, tiny_model: Path, **changes: float) -> Learner:
    settings = LearnerSettings(
        loss_type=loss, preference_beta=BETA, max_grad_norm=0, threads=1, token_budget=160, **changes  # type: ignore[arg-type]
    )  # fmt: skip
    learner = Learner(str(tiny_model), settings)
    disturb(learner.host.trainer, scale=0.03, seed=2)
    return learner


def preference(loss: str) -> Preference:
    found = find_objective(loss).preference
    assert found is not None
    return found


def gaps(learner: Learner, rows: Sequence[TokenRow]) -> list[float]:
    return preference_gaps(learner.host.trainer, learner.host.limits, rows)


def reference(learner: Learner, rows: Sequence[TokenRow], loss: str) -> Computed:
    """The loss as the papers write it, in float64."""
    model = double(learner.host.trainer.model)
    h: dict[str, torch.Tensor] = {}
    for row in rows:
        plain = dataclasses.replace(row, temperature=1.0)
        on = torch.tensor(row.mask[1:]).bool()
        with model.disable_adapter(), torch.no_grad():
            base = reference_logprobs(model, plain)[on].sum()
        h[row.trajectory_id] = (
            h.get(row.trajectory_id, torch.zeros(())) + reference_logprobs(model, plain)[on].sum() - base
        )
    if loss == "dpo":
        pairs = [("g1-0", "g1-1"), ("g2-2", "g2-0")]
        losses = [-torch.nn.functional.logsigmoid(BETA * (h[best] - h[worst])) for best, worst in pairs]
    else:
        liked = {row.trajectory_id: row.advantage > 0 for row in rows}
        losses = [
            1 - torch.sigmoid(BETA * h[name]) if good else torch.sigmoid(BETA * h[name]) for name, good in liked.items()
        ]
    total = torch.stack(losses).mean()
    total.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return Computed(float(total.detach()), found)


@pytest.mark.parametrize("loss", ["dpo", "apo_zero_unpaired"])
def test_the_gradient_and_the_loss_are_those_of_the_formulas(loss: str, tiny_model: Path) -> None:
    learner, rows = build_learner(loss, tiny_model), build_groups()
    expected = reference(learner, rows, loss)
    weighed, mean_loss = preference(loss).weighted_rows(rows, gaps(learner, rows), BETA)
    micros = learner.host.trainer.prepare(weighed, only_step=True)
    assert len(micros) > 1, "the case must span several micro-batches"
    ours, _ = backward(learner.host.trainer, micros)
    assert Computed(mean_loss, ours.gradient).relative_error(expected) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "apo_zero_unpaired"])
def test_what_is_preferred_becomes_likelier_than_what_is_not(loss: str, tiny_model: Path) -> None:
    learner, rows = build_learner(loss, tiny_model, learning_rate=3e-3, steps_per_round=2), build_groups()
    before = gaps(learner, rows)
    reports = [learner.train_round(rows) for _ in range(4)]
    gained = [after - first for after, first in zip(gaps(learner, rows), before, strict=True)]
    liked = sum(gain for gain, row in zip(gained, rows, strict=True) if row.advantage > 0)
    disliked = sum(gain for gain, row in zip(gained, rows, strict=True) if row.advantage < 0)
    assert liked > disliked + 1.0
    assert reports[-1].loss < reports[0].loss
    assert reports[0].optimizer_steps == 2


def test_only_the_best_and_the_worst_of_a_group_are_compared() -> None:
    rows = build_groups()
    weighed, mean_loss = preference("dpo").weighted_rows(rows, [0.0] * len(rows), BETA)
    kept = {row.trajectory_id: row.advantage for row in weighed}
    assert set(kept) == {"g1-0", "g1-1", "g2-0", "g2-2"}
    assert {name for name, weight in kept.items() if weight < 0} == {"g1-1", "g2-0"}
    assert mean_loss == pytest.approx(0.6931, abs=1e-4)


def test_rows_that_nothing_is_preferred_in_are_no_round(tiny_model: Path) -> None:
    learner = build_learner("dpo", tiny_model)
    alone = [dataclasses.replace(row, group="") for row in build_groups()]
    with pytest.raises(NoLearningSignal, match="preferred"):
        learner.train_round(alone)


@pytest.mark.parametrize("loss", ["dpo", "apo_zero_unpaired"])
def test_a_daemon_trains_by_preference_from_judged_groups(
    loss: str, store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    controller = make_controller(learner=LearnerSettings(loss_type=loss, learning_rate=1e-2))
    for now in (1000.0, 1005.0, 1010.0):  # what does not answer on a busy machine is tried again
        controller.step(now)
    assert store.policies.live()["agent"].version == 1, store.decisions.decisions_of("agent", limit=5)
    (held,) = store.rounds.page("agent")
    assert held.metrics["weight_change"] > 0
    assert held.metrics["rows"] == 4


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"ungrouped": "baseline", "learner": {"loss_type": "dpo"}}, "only one response", "apo_zero_unpaired"),
        ({"turn_weight": 1.0, "learner": {"loss_type": "dpo"}}, "turn_weight has no effect", "set it to 0"),
        ({"learner": {"loss_type": "dpo", "mean_over": "rows"}}, "mean_over", "or null"),
        ({"learner": {"loss_type": "dpo", "epsilon": 0.1}}, "epsilon has no effect", "leave it out"),
    ],
)
def test_settings_without_effect_on_a_preference_loss_are_refused_with_reason_and_remedy(
    changes: dict[str, Any], reason: str, remedy: str
) -> None:
    fields = {
        "store": "s",
        "model": "agent",
        "base_model": "b",
        "vllm": ["http://x"],
        "checkpoints": "c",
        "judge": "a:b",
    }
    with pytest.raises((ValidationError, SettingError), match=f"(?s){reason}.*{remedy}"):
        TrainerSettings.model_validate(fields | changes)
    unpaired = {"loss_type": "apo_zero_unpaired", "preference_beta": 0.5}
    TrainerSettings.model_validate(fields | {"ungrouped": "baseline", "learner": unpaired})
