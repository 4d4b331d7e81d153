"""Rows that are left out, and tokens that truncation leaves: a policy too far away, top-p and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from ratchet.store.records import Verdict
from ratchet.store.store import Store
from ratchet.trainer.errors import RowError
from ratchet.trainer.learner.forward_pass import collate
from ratchet.trainer.learner.lm_head import HeadFunction, token_logprobs
from ratchet.trainer.learner.loss import importance_weight, kept_rows, policy_loss
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.rounds.round_runner import RoundRunner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.records import answered_trajectory, commit_round, judged_group
from tests.harness.trainer.tiny import build_row
from tests.trainer.test_learning_rate import RecordingLearner
from tests.trainer.test_lm_head import vllms_choice
from tests.trainer.test_loss_contract import build_trainer, double


def left(off: float, ages: Sequence[int | None], limit: float | None = 2.0) -> list[bool]:
    """Which rows are trained whose tokens are all `off` nats from the policy that learns."""
    rows = [replace(build_row(1), age=age) for age in ages]
    micro = collate([[row] for row in rows], 0, torch.device("cpu"))
    micro["old_per_token_logps"] = micro["sampling_per_token_logps"] + off
    found: list[bool] = kept_rows(micro, limit)[:, 0].tolist()
    return found


def test_a_fresh_row_may_differ_by_rounding_alone_and_an_old_one_by_what_was_learnt_since() -> None:
    ages = (0, 1, 3, 7, 20, None)
    assert left(0.02, ages) == [True] * 6
    assert left(0.2, ages) == left(-0.2, ages) == [False, True, True, True, True, True]
    assert left(0.4, ages) == [False, False, True, True, True, True]
    assert left(1.3, ages) == [False] * 6
    assert left(1.3, ages, None) == [True] * 6


SAMPLED, VOCABULARY = 32_000, 32  # tokens of all rows, ids


def rejected(tokens: int, age: int, *, nats: float = 0.0, noise: float = 0.0, heavy: bool = False) -> float:
    """The share of rows that are rejected at L = 2, of rows sampled from real distributions.

    The policy that learns is a mean KL of `nats` a token from the one that sampled; kernels add `noise` to each
    logprob, with tails of Student's t of 3 degrees of freedom if `heavy`.
    """
    generator = torch.Generator().manual_seed(tokens)
    rows = max(250, min(1000, SAMPLED // tokens))
    logits = 3 * torch.randn(rows, tokens, VOCABULARY, generator=generator)
    change = torch.randn(logits.shape, generator=generator)
    engine = logits.log_softmax(-1)
    low, high = 0.0, 10.0
    few = slice(max(1, 1000 // tokens))
    for _ in range(20 if nats else 0):
        middle = (low + high) / 2
        gap = engine[few] - (logits[few] + middle * change[few]).log_softmax(-1)
        low, high = (middle, high) if (engine[few].exp() * gap).sum(-1).mean() < nats else (low, middle)
    sampled = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=generator).view(rows, tokens, 1)
    trainer = (logits + low * change).log_softmax(-1).gather(-1, sampled)[..., 0]
    error = torch.randn((3 if heavy else 0) + 1, rows, tokens, generator=generator)
    scale = (error[1:].pow(2).mean(0) * 3).sqrt() if heavy else 1.0  # of unit variance
    micro = {
        "trained": torch.ones(rows, tokens, dtype=torch.bool),
        "importance": torch.ones(rows, 1, dtype=torch.bool),
        "age": torch.full((rows, 1), float(age)),
        "sampling_per_token_logps": engine.gather(-1, sampled)[..., 0] + noise * error[0] / scale,
        "old_per_token_logps": trainer,
    }
    return 1 - float(kept_rows(micro, 2.0).float().mean())


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 64, 256])
def test_good_rows_of_any_length_stay_and_those_of_another_policy_go(tokens: int) -> None:
    good = {
        "noise of mixtures of experts": rejected(tokens, 0, noise=0.15),
        "the same with heavy tails": rejected(tokens, 0, noise=0.15, heavy=True),
        "a large healthy round since": rejected(tokens, 1, nats=0.024),
        "one at the limit of health, with that noise": rejected(tokens, 1, nats=0.05, noise=0.15),
        "four rounds since": rejected(tokens, 4, nats=0.1),
    }
    assert max(good.values()) < 0.01, good
    foreign = rejected(tokens, 0, nats=1.0)
    assert foreign > (0.5 if tokens == 1 else 0.7 if tokens < 8 else 0.98), foreign


def test_differences_of_both_signs_do_not_cancel() -> None:
    row = replace(build_row(1), age=0)
    micro = collate([[row]], 0, torch.device("cpu"))
    signs = 1.0 - 2.0 * (torch.arange(micro["trained"].shape[1]) % 2)
    micro["old_per_token_logps"] = micro["sampling_per_token_logps"] + 1.0 * signs
    assert float((signs * micro["trained"]).sum().abs()) < 6 < row.tokens_trained  # the mean is near 0
    assert not kept_rows(micro, 2.0).any()


class Reading(RecordingLearner):
    """A learner that notes how old its rows are."""

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        self.ages = {row.trajectory_id: row.age for row in rows}
        return super().train_round(rows, rate_scale)


def test_a_rows_age_counts_the_rounds_that_were_learnt_from_since(store: Store, tmp_path: Path) -> None:
    for version in range(3):  # versions 1 to 3; 2 does not pass its proof
        commit_round(store, "agent", version + 1, base=1 if version == 2 else version, checkpoint="c")
        if version == 1:
            store.policies.reject("agent", 2, {})
    group = judged_group(store, ["new", "older", "oldest"], [0.0, 0.5, 1.0], versions=[3, 1, 0])
    verdicts = store.groups.verdicts(group.members).values()
    store.groups.replace_verdicts([msgspec.structs.replace(verdict, judged_at=10.0) for verdict in verdicts])
    learner = Reading()
    RoundRunner(store, "agent", tmp_path).run_round(learner, [group], 3)
    assert learner.ages == {"new": 0, "older": 1, "oldest": 2}


TOKENS, HIDDEN, TEMPERATURE = 12, 6, 0.8
TRUNCATIONS = [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (8, 0.9, 0.02)]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("stale", [False, True], ids=["same policy", "older policy"])
def test_the_expected_gradient_is_that_of_the_truncated_policy(
    truncation: tuple[int, float, float], stale: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.nn.Linear(HIDDEN, TOKENS, bias=False).double().requires_grad_(False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator, dtype=torch.float64))
    scores = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    z = head(hidden)[0] / TEMPERATURE
    left = vllms_choice(z.detach(), *truncation)
    assert 1 < int(left.sum()) < TOKENS
    policy = z.masked_fill(~left, -torch.inf).log_softmax(0)
    (expected,) = torch.autograd.grad(-(policy.exp() * scores).sum(), hidden, retain_graph=True)
    noise = 0.05 * torch.randn(TOKENS, generator=generator, dtype=torch.float64) if stale else 0.0
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
