"""The running baseline: only the past, never the sample itself."""

from __future__ import annotations

import random
import statistics

import pytest

from ratchet.store.records import PastScore
from ratchet.store.store import Store
from ratchet.trainer.controller.advantages import SHRINKAGE, AdvantageEstimator, ScoreHistory, past_score
from ratchet.trainer.controller.judges.judge_runner import JudgedGroupCache, JudgeRunner
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.settings.trainer_settings import MAX_SCORES_PER_FAMILY
from tests.harness.trainer.agents import agents_work


def scored(name: str, score: float, at: float, family: str = "mail", cohort: str = "c") -> PastScore:
    return PastScore(trajectory_id=name, family=family, cohort=cohort, version=0, score=score, judged_at=at)


def test_a_baseline_is_made_of_earlier_scores_of_the_same_family_alone() -> None:
    book = ScoreHistory([scored("a", 0.0, 1.0), scored("b", 1.0, 2.0), scored("other", 9.0, 2.0, family="math")])
    sample = scored("s", 5.0, 3.0, cohort="new")
    book.add(sample)
    book.add(scored("later", 7.0, 4.0))
    found = book.baseline(sample, 2)
    assert found is not None
    assert found.count == 2
    assert found.mean == pytest.approx(0.5, abs=0.01)
    assert found.std == pytest.approx(0.5, abs=0.01)


def test_too_few_scores_are_no_baseline() -> None:
    book = ScoreHistory([scored("a", 0.0, 1.0)])
    assert book.baseline(scored("s", 1.0, 2.0), 2) is None
    assert book.baseline(scored("s", 1.0, 2.0, family="never seen"), 1) is None


def test_attempts_at_the_same_task_draw_the_baseline_to_their_mean() -> None:
    easy = [scored(f"e{n}", 1.0, float(n), cohort="easy") for n in range(int(SHRINKAGE))]
    hard = [scored(f"h{n}", 0.0, float(n), cohort="hard") for n in range(int(SHRINKAGE))]
    book = ScoreHistory([*easy, *hard])
    baselines = {name: book.baseline(scored("s", 1.0, 99.0, cohort=name), 2) for name in ("easy", "hard", "new")}
    means = {name: found.mean for name, found in baselines.items() if found is not None}
    assert means["hard"] == pytest.approx(means["new"] / 2)
    assert means["easy"] == pytest.approx((1.0 + means["new"]) / 2)


def test_the_newest_scores_count_most() -> None:
    book = ScoreHistory([scored(str(n), float(n >= 200), float(n)) for n in range(400)])
    found = book.baseline(scored("s", 1.0, 999.0, cohort="new"), 16)
    assert found is not None
    assert found.mean > 0.85


@pytest.mark.slow
def test_the_baseline_leaves_the_expected_gradient_alone() -> None:
    """With scores that do not depend on what was sampled, the mean advantage over many samples is zero."""
    randomness = random.Random(1)
    book, advantages = ScoreHistory(), []
    for number in range(4000):
        sample = scored(str(number), randomness.random(), float(number), cohort=str(number))
        found = book.baseline(sample, 16)
        book.add(sample)
        if found is not None:
            advantages.append(sample.score - found.mean)
    assert abs(statistics.fmean(advantages)) < 0.02


def test_a_single_that_waits_long_for_its_round_keeps_what_it_was_compared_with(store: Store) -> None:
    book = ScoreHistory([scored(f"old{n}", float(n % 2), float(n), family="task:mail") for n in range(40)])
    estimator = AdvantageEstimator("dr_grpo", min_baseline_samples=16, history=book)
    agents_work(store, "mail/1", [1.0])
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["mail/1-0"], now=101.0)
    keeper = JudgeRunner(
        store, FunctionJudge("tests.harness.trainer.judge_samples:scripted", clock=lambda: 102.0), attempts=1,
        retry_seconds=1.0, alarm_after=5, judged=JudgedGroupCache(store, estimator),
    )  # fmt: skip
    member = store.trajectories.read("mail/1-0")
    keeper.submit([group], store.trajectories.read)
    assert keeper.collect_results(102.0, timeout=60.0) == 1
    (earned,) = estimator.advantages([member.trajectory], list(store.groups.verdicts(group.members).values())) or ()
    assert earned > 0.3
    for number in range(MAX_SCORES_PER_FAMILY):  # a ramp's traffic, say
        book.add(scored(f"new{number}", 1.0, 200.0 + number, family="task:mail"))
    assert book.baseline(past_score(member.trajectory, store.groups.verdicts(group.members)["mail/1-0"]), 16) is None
    assert estimator.advantages([member.trajectory], list(store.groups.verdicts(group.members).values())) == (earned,)
    keeper.close()
