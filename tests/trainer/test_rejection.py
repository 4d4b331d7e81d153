"""A row is left out where it is farther from the policy than its age explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.learner.importance_sampling import kept
from ratchet.trainer.learner.micro_batches import collate
from ratchet.trainer.learner_api.protocol import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from tests.harness.records import judged_group
from tests.harness.trainer.tiny import build_row
from tests.trainer.test_round_size import RecordingLearner


def left(off: float, ages: Sequence[int | None], limit: float | None = 2.0) -> list[bool]:
    """Which rows are trained whose tokens are all `off` nats from the policy that learns."""
    rows = [replace(build_row(1), age=age) for age in ages]
    micro = collate([[row] for row in rows], 0, torch.device("cpu"))
    micro["old_per_token_logps"] = micro["sampling_per_token_logps"] + off
    found: list[bool] = kept(micro, limit)[:, 0].tolist()
    return found


def test_a_fresh_row_may_differ_by_rounding_alone_and_an_old_one_by_what_was_learnt_since() -> None:
    ages = (0, 1, 3, 7, 20, None)
    assert left(0.02, ages) == [True] * 6
    assert left(0.15, ages) == left(-0.15, ages) == [False, True, True, True, True, True]
    assert left(0.5, ages) == [False, False, False, True, True, True]
    assert left(0.7, ages) == [False] * 6
    assert left(0.7, ages, None) == [True] * 6


class Reading(RecordingLearner):
    """A learner that notes how old its rows are."""

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        self.ages = {row.trajectory_id: row.age for row in rows}
        return super().train_round(rows, rate_scale)


def test_a_rows_age_counts_the_rounds_that_were_learnt_from_since(store: Store, tmp_path: Path) -> None:
    for version in range(3):  # versions 1 to 3; 2 does not pass its proof
        held = store.rounds.start("agent", 1 if version == 2 else version)
        store.rounds.commit(held.id, version=version + 1, checkpoint="c", groups=[], metrics={})
        if version == 1:
            store.policies.reject("agent", 2, {})
    group = judged_group(store, ["new", "older", "oldest"], [0.0, 0.5, 1.0], versions=[3, 1, 0])
    verdicts = store.groups.verdicts(group.members).values()
    store.groups.replace_verdicts([msgspec.structs.replace(verdict, judged_at=10.0) for verdict in verdicts])
    learner = Reading()
    RoundRunner(store, "agent", tmp_path).run_round(learner, [group], 3)
    assert learner.ages == {"new": 0, "older": 1, "oldest": 2}
