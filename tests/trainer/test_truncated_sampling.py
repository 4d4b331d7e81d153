"""Rows sampled with top_k, top_p and min_p: the gradient is that of the truncated policy's expected score.

By enumeration of the vocabulary in float64, through the learner's own head, importance weight and loss.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratchet.store.records import Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.errors import RowError
from ratchet.trainer.learner.lm_head import HeadFunction, token_logprobs
from ratchet.trainer.learner.loss import importance_weight, policy_loss
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.records import answered_trajectory
from tests.harness.trainer.tiny import build_row
from tests.trainer.test_lm_head import vllms_choice
from tests.trainer.test_loss_contract import build_trainer, double
from tests.trainer.test_rejection import Reading

VOCABULARY, HIDDEN, TEMPERATURE = 12, 6, 0.8
TRUNCATIONS = [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (8, 0.9, 0.02)]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("stale", [False, True], ids=["same policy", "older policy"])
def test_the_expected_gradient_is_that_of_the_truncated_policy(
    truncation: tuple[int, float, float], stale: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).double().requires_grad_(False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator, dtype=torch.float64))
    scores = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    z = head(hidden)[0] / TEMPERATURE
    left = vllms_choice(z.detach(), *truncation)
    assert 1 < int(left.sum()) < VOCABULARY
    policy = z.masked_fill(~left, -torch.inf).log_softmax(0)
    (expected,) = torch.autograd.grad(-(policy.exp() * scores).sum(), hidden, retain_graph=True)
    noise = 0.05 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) if stale else 0.0
    engine = (z.detach() + noise).masked_fill(~left, -torch.inf).log_softmax(0)  # what vLLM sampled from and recorded
    sampled = torch.where(left)[0]  # each token once, weighted by its probability

    def gradient(rule: torch.Tensor | None) -> tuple[torch.Tensor, float]:
        """The expected gradient of the loss, and the expected importance weight."""
        count = len(sampled)
        logprobs, entropies = token_logprobs(
            hidden.expand(count, HIDDEN),
            head,
            sampled,
            torch.full((count,), TEMPERATURE, dtype=torch.float64),
            HeadFunction(),
            rule,
        )
        micro = {
            "trained": torch.ones(count, 1, dtype=torch.bool), "importance": torch.ones(count, 1, dtype=torch.bool),
            "sampling_per_token_logps": engine[sampled, None], "old_per_token_logps": logprobs.detach()[:, None],
            "weights": engine[sampled, None].exp(),
        }  # fmt: skip
        weight = importance_weight(micro, 1e9)
        micro["advantages"] = weight * scores[sampled, None]
        loss = policy_loss(micro, logprobs[:, None], entropies[:, None], LearnerSettings())
        (found,) = torch.autograd.grad(loss, hidden)
        return found, float((micro["weights"] * weight).sum())

    ours, mean_weight = gradient(torch.tensor([truncation] * len(sampled)).double())
    assert float((ours - expected).norm() / expected.norm()) < 1e-12
    assert mean_weight == pytest.approx(1.0, abs=1e-12)
    whole, mass = gradient(None)  # over the whole vocabulary: as if nothing had been left out
    assert float((whole - expected).norm() / expected.norm()) > 0.05
    if not stale:
        assert mass == pytest.approx(float(z.detach().softmax(0)[left].sum()))


def test_a_truncated_row_is_scored_over_the_tokens_that_were_left(tiny_model: Path, tmp_path: Path) -> None:
    trainer = build_trainer(LearnerSettings(max_grad_norm=0), tiny_model, tmp_path, budget=10_000)
    twin, rows, expected = double(trainer.model), [], []
    for seed, truncation in enumerate([*TRUNCATIONS, None]):
        row = build_row(seed, temperature=0.5, truncation=truncation)
        with torch.no_grad():
            z = twin(input_ids=torch.tensor([row.ids])).logits[0, :-1] / 0.5
        for place in range(1, len(row.ids)):
            if row.mask[place]:
                left = vllms_choice(z[place - 1], *(truncation or (0, 1.0, 0.0)))
                left[row.ids[place]] = True
                z[place - 1] = z[place - 1].masked_fill(~left, -torch.inf)
        logprobs = z.log_softmax(-1).gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        mask = torch.tensor(row.mask[1:]).bool()
        rows.append(replace(row, logprobs=(0.0, *torch.where(mask, logprobs, 0.0).tolist())))
        expected.append(logprobs[mask])
    micros = trainer.prepare(rows)
    found = trainer.mismatch(micros)
    assert found.tokens == sum(row.tokens_trained for row in rows)
    assert found.largest < 1e-4
    trainer.backward(micros)
    whole = [replace(row, truncation=None) for row in rows]
    assert trainer.mismatch(trainer.prepare(whole)).largest > 0.5


@pytest.mark.parametrize("truncation", [(-1, 1.0, 0.0), (0, 0.0, 0.0), (0, 1.1, 0.0), (0, 1.0, -0.1)])
def test_a_truncation_that_leaves_nothing_is_refused(truncation: tuple[int, float, float]) -> None:
    with pytest.raises(RowError, match="truncation is"):
        build_row(1, truncation=truncation)


@pytest.mark.parametrize("penalized", [False, True])
def test_a_round_counts_penalized_answers_and_trains_them_only_if_wanted(
    penalized: bool, store: Store, tmp_path: Path
) -> None:
    for name, sampling in (("plain", {"top_p": 0.9}), ("penalized", {"presence_penalty": 0.5})):
        answered_trajectory(store, name, sampling={"temperature": 1.0, **sampling})
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["plain", "penalized"], now=101.0)
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=score, judged_at=10.0)
        for name, score in (("plain", 0.0), ("penalized", 1.0))
    ]
    store.groups.record_verdicts(group.id, verdicts)
    learner = Reading()
    RoundRunner(store, "agent", tmp_path, penalized=penalized).run_round(learner, [store.groups.get(group.id)], 0)
    assert set(learner.ages) == ({"plain", "penalized"} if penalized else {"plain"})
    (trained,) = store.rounds.page("agent")
    untrained = trained.metrics["untrained_tokens"]
    assert untrained == ({} if penalized else {"penalized_sampling": 2})
