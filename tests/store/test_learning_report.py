"""Is it learning? The report claims nothing that its intervals do not hold."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable

import pytest

from ratchet.store.records import PastScore, Verdict
from ratchet.store.reports.learning_report import LearningReport, tallies
from ratchet.store.reports.learning_report import learning_report as report_on
from ratchet.store.statistics import interval, student_t
from ratchet.store.store import Store
from tests.harness.records import judged_group


def learning_report(scores: list[PastScore]) -> LearningReport:
    return report_on(tallies(scores))


def traffic(
    version: int, rate: float, count: int, seed: int = 0, family: str = "mail", tasks: int = 20
) -> list[PastScore]:
    randomness = random.Random(f"{version}{seed}")
    return [
        PastScore(
            trajectory_id=f"{version}-{family}-{number}", family=family, cohort=f"{family}/{number % tasks}",
            version=version, score=float(randomness.random() < rate), judged_at=version * 1e6 + number,
        )
        for number in range(count)
    ]  # fmt: skip


def test_a_real_gain_is_reported_with_its_interval() -> None:
    report = learning_report([*traffic(0, 0.3, 200), *traffic(1, 0.5, 50), *traffic(2, 0.8, 200)])
    (whole,) = report.families
    assert (whole.before.first_version, whole.after.first_version) == (0, 2)
    assert whole.gain.verdict == "better"
    assert whole.gain.low < whole.after.mean - whole.before.mean < whole.gain.high
    assert whole.same_tasks is not None
    assert (whole.same_tasks.count, whole.same_tasks.verdict) == (20, "better")
    assert [version.version for version in report.versions] == [0, 1, 2]


def test_a_version_that_was_rejected_or_is_in_a_ramp_is_no_result_of_training() -> None:
    scores = [*traffic(0, 0.3, 200), *traffic(1, 0.8, 200), *traffic(2, 0.0, 200), *traffic(3, 0.1, 40)]
    report = report_on(tallies(scores), left_out=[2, 3])
    assert (report.families[0].after.last_version, report.families[0].gain.verdict) == (1, "better")
    assert [version.version for version in report.versions] == [0, 1, 2, 3]
    assert report.notes[-1] == "left out: @2, @3, rejected or in a ramp"
    alone = report_on(tallies(scores), left_out=[1, 2, 3])
    assert re.search("two versions .* only version 0", alone.missing or "")


def test_without_a_difference_nothing_is_claimed_more_often_than_one_in_ten() -> None:
    claims = 0
    for seed in range(100):
        report = learning_report([*traffic(0, 0.5, 60, seed), *traffic(1, 0.5, 60, seed)])
        claims += report.families[0].gain.verdict != "unknown"
    assert claims <= 10


def test_easier_tasks_are_not_taken_for_learning() -> None:
    hard, easy = traffic(0, 0.0, 100, tasks=5), traffic(1, 1.0, 100, family="other", tasks=5)
    mixed = [*hard, *traffic(1, 0.0, 100, tasks=5), *easy]
    whole = learning_report(mixed).families[0]
    assert whole.gain.verdict == "better"  # the mix has changed
    assert whole.same_tasks is not None
    assert whole.same_tasks.value == pytest.approx(0.0)


def test_families_are_reported_separately() -> None:
    both = [
        *traffic(0, 0.2, 100), *traffic(1, 0.9, 100), *traffic(0, 0.9, 100, family="math"),
        *traffic(1, 0.2, 100, family="math"),
    ]  # fmt: skip
    verdicts = {family.family: family.gain.verdict for family in learning_report(both).families}
    assert (verdicts["mail"], verdicts["math"]) == ("better", "worse")


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ([], "none has any"),
        (traffic(3, 0.5, 90), "only version 3 has any"),
        (traffic(0, 0.5, 9) + traffic(1, 0.5, 9), "needs 30"),
    ],
)
def test_too_few_scores_are_reported(scores: list[PastScore], why: str) -> None:
    report = learning_report(scores)
    assert report.families == ()
    assert why in (report.missing or "")


def test_a_revised_verdict_counts_once_and_as_revised() -> None:
    scores = [*traffic(0, 0.0, 40), *traffic(1, 0.0, 40)]
    revised = [
        PastScore(
            trajectory_id=one.trajectory_id, family=one.family, cohort=one.cohort, version=1, score=1.0, judged_at=9e9
        )
        for one in scores
        if one.version == 1
    ]
    whole = learning_report([*scores, *revised]).families[0]
    assert (whole.after.count, whole.after.mean) == (40, 1.0)


def test_no_interval_reaches_over_what_scores_can_be_and_equal_scores_are_no_certainty() -> None:
    report = learning_report([*traffic(0, 0.0, 30), *traffic(1, 1.0, 30), *traffic(2, 1.0, 1)])
    gain = report.families[0].gain
    assert (gain.value, gain.high) == (1.0, 1.0)
    assert 0.85 < gain.low < 0.99
    assert all(0 <= version.low <= version.mean <= version.high <= 1 for version in report.versions)
    assert report.versions[0].high > 0.02
    assert (report.versions[2].low, report.versions[2].high) == (0.0, 1.0)  # one score says nothing


def test_scores_below_zero_widen_what_scores_can_be() -> None:
    scores = [*traffic(0, 0.5, 40), *traffic(1, 0.5, 40)]
    lowered = [PastScore(**{name: getattr(one, name) for name in one.__struct_fields__} | {"score": one.score * 4 - 3})
               for one in scores]  # fmt: skip
    plain, wide = learning_report(scores), learning_report(lowered)
    assert wide.versions[0].low == pytest.approx(plain.versions[0].low * 4 - 3)
    assert wide.families[0].gain.high == pytest.approx(plain.families[0].gain.high * 4)


def test_sums_of_the_database_are_those_of_the_scores(store: Store) -> None:
    for version, scores in ((0, [0.0, 1.0, 0.5, 0.25]), (1, [1.0, 1.0, 0.5, 0.0])):
        names = [f"{version}-{place}" for place in range(4)]
        judged_group(store, names, scores, versions=[version] * 4, task=f"mail/{version}")
    again = Verdict(trajectory_id="1-3", group_id=None, judge="rule", judge_version="1", score=0.75, judged_at=9.0)
    store.groups.replace_verdicts([again])
    of_scores = {one.cohort: one for one in tallies(store.groups.past_scores("agent", "1"))}
    of_sums = {one.cohort: one for one in store.groups.score_tallies("agent", "1")}
    assert of_sums == of_scores
    assert (of_sums["task:mail/1"].sums.count, of_sums["task:mail/1"].sums.total) == (4, 3.25)


def test_numbers_whose_squares_are_infinite_have_the_widest_interval() -> None:
    assert interval([1e300, 0.0, 0.5], 1e300) == (-1e300, 1e300)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 30, 101, 399, 400, 1000])
def test_students_quantiles_are_those_of_scipy(degrees: int, confidence: float) -> None:
    from scipy.stats import t

    error = 1e-8 if degrees < 400 else 0.006
    if confidence > 0.95 and degrees >= 400:
        error = 0.02
    assert student_t(confidence, degrees) == pytest.approx(t.ppf((1 + confidence) / 2, degrees), rel=error)


def agents(better: float, worse: float) -> Callable[[random.Random], float]:
    """A task's difference of two agents that succeed or fail."""
    return lambda chance: (chance.random() < better) - (chance.random() < worse)


def hard_and_easy(gain: float) -> Callable[[random.Random], float]:
    """Tasks of every difficulty, four attempts each; one agent is better by `gain` at each."""

    def one(chance: random.Random) -> float:
        easy = chance.uniform(0.1, 0.8)
        return statistics.fmean((chance.random() < easy + gain) - (chance.random() < easy) for _ in range(4))

    return one


CASES = [
    (agents(0.5, 0.5), 0.0), (agents(0.97, 0.9), 0.07), (agents(0.02, 0.0), 0.02), (agents(0.05, 0.0), 0.05),
    (hard_and_easy(0.1), 0.1), (lambda chance: chance.gauss(0.1, 0.3), 0.1),
]  # fmt: skip


@pytest.mark.parametrize("tasks", [4, 10, 30])
@pytest.mark.parametrize(("draw", "truth"), CASES)
def test_the_interval_holds_the_truth_for_few_tasks_and_rare_differences(
    draw: Callable[[random.Random], float], truth: float, tasks: int
) -> None:
    chance = random.Random(tasks)
    held = 0
    for _ in range(300):
        low, high = interval([draw(chance) for _ in range(tasks)], 1.0)
        held += low <= truth <= high
    assert held >= 0.92 * 300


def test_equal_differences_prove_little_and_more_of_them_more() -> None:
    few, many = interval([0.0] * 5, 1.0), interval([0.0] * 500, 1.0)
    assert few[0] < -0.3 < 0.3 < few[1]
    assert -0.01 < many[0] < 0.0 < many[1] < 0.01


def test_one_task_shows_nothing() -> None:
    assert interval([1.0], 1.0) == (-1.0, 1.0)
