"""A row is left out where it is farther from the policy than its age and its number of tokens explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.learner.forward_pass import collate
from ratchet.trainer.learner.loss import kept_rows
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from tests.harness.records import commit_round, judged_group
from tests.harness.trainer.tiny import build_row
from tests.trainer.test_learning_rate import RecordingLearner


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
