"""No ranking changes silently: failures count, unjudged attempts are bounds, ties are reported as ties."""

from __future__ import annotations

import itertools
import random

import pytest

from ratchet.trainer.statistics import (
    ComparisonVerdict,
    Mark,
    Marks,
    Missing,
    ScoreRange,
    compare,
    rank,
)

FAILED, UNJUDGED = Missing.FAILED, Missing.UNJUDGED


def marks(*scores: Mark | tuple[Mark, ...]) -> Marks:
    """Scores of tasks 0, 1, 2, ...; a tuple holds several attempts at one task."""
    return {str(number): given if isinstance(given, tuple) else (given,) for number, given in enumerate(scores)}


def agent(success: float, tasks: int, attempts: int = 4, seed: int = 0) -> Marks:
    """An agent that succeeds at each attempt with the same chance."""
    chance = random.Random(f"{success}{seed}")
    return {str(n): tuple(float(chance.random() < success) for _ in range(attempts)) for n in range(tasks)}


def test_a_real_difference_is_shown_and_seen_from_the_other_side_alike() -> None:
    found = rank({"small": agent(0.3, 30), "large": agent(0.8, 30)})
    assert (found.winner, found.first) == ("large", ("large",))
    assert [one.candidate for one in found.scores] == ["large", "small"]
    there, back = found.pair("large", "small"), found.pair("small", "large")
    assert (there.verdict, back.verdict) == (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE)
    assert (there.low, there.high) == (-back.high, -back.low)
    assert there.low > 0.2


def test_crashes_count_as_failures_and_never_as_skipped() -> None:
    crashing = marks(1.0, FAILED, FAILED, FAILED, FAILED, FAILED)  # right wherever it did not crash
    steady = marks(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
    found = rank({"crashing": crashing, "steady": steady})
    assert [(one.candidate, one.mean) for one in found.scores] == [("steady", 5 / 6), ("crashing", 1 / 6)]
    assert [one.failed for one in found.scores] == [0, 5]


def test_a_crash_never_counts_more_than_the_lowest_score_of_a_judge_with_negative_scores() -> None:
    found = rank({"crashing": marks(*[FAILED] * 8), "bad": marks(*[-2.0, -3.0] * 4)})
    assert found.failure_score == -3.0
    assert [(one.candidate, one.mean) for one in found.scores] == [("bad", -2.5), ("crashing", -3.0)]
    assert found.score_range == ScoreRange(-3.0, 1.0)


def test_a_tie_is_reported_as_a_tie() -> None:
    found = rank({"one": agent(0.5, 20, seed=1), "other": agent(0.5, 20, seed=2), "bad": agent(0.05, 20)})
    assert found.winner is None
    assert set(found.first) == {"one", "other"}
    assert found.pair("one", "other").verdict is ComparisonVerdict.TIED
    equal = compare(marks(*[1.0] * 10), marks(*[1.0] * 10))
    assert (equal.verdict, equal.difference, equal.p_value) == (ComparisonVerdict.TIED, 0.0, 1.0)
    assert equal.low < 0 < equal.high


def test_attempts_at_one_task_are_not_taken_for_tasks() -> None:
    once = compare(marks((1.0,), (0.0,), (1.0,)), marks((0.0,), (0.0,), (0.0,)))
    often = compare(marks((1.0,) * 50, (0.0,) * 50, (1.0,) * 50), marks((0.0,) * 50, (0.0,) * 50, (0.0,) * 50))
    assert (once.low, once.high, once.p_value) == (often.low, often.high, often.p_value)


def test_no_winner_is_named_where_the_unjudged_could_change_it() -> None:
    better, worse = marks(*[1.0] * 8), marks(*[0.0] * 8)
    assert compare(better, worse).verdict is ComparisonVerdict.BETTER
    some = marks(*[1.0] * 4, *[UNJUDGED] * 4)
    inconclusive = compare(some, worse)
    assert (inconclusive.verdict, inconclusive.unjudged, inconclusive.tasks) == (ComparisonVerdict.INCONCLUSIVE, 4, 4)
    assert rank({"better": some, "worse": worse}).winner is None


def test_a_few_unjudged_that_can_change_nothing_do_not_hide_a_winner() -> None:
    found = compare({**agent(0.95, 40), "0": (UNJUDGED, 1.0)}, agent(0.2, 40))
    assert (found.verdict, found.unjudged, found.settled) == (ComparisonVerdict.BETTER, 1, True)


def test_the_interval_holds_whatever_the_unjudged_would_have_got() -> None:
    given: list[Mark] = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, UNJUDGED, UNJUDGED]
    other = marks(*[0.0] * 4, *[1.0] * 4)
    bound = compare(marks(*given), other)
    for filled in itertools.product((0.0, 1.0), repeat=2):
        known = compare(marks(*given[:6], *filled), other)
        assert bound.low <= known.low <= known.high <= bound.high
        assert bound.p_value >= known.p_value


def test_a_task_that_a_candidate_did_not_run_is_unjudged_for_it() -> None:
    found = compare(marks(1.0, 1.0), marks(0.0))
    assert (found.tasks, found.unjudged) == (1, 1)


def test_nothing_judged_shows_nothing() -> None:
    found = compare(marks(UNJUDGED, UNJUDGED), marks(1.0, 1.0), score_range=ScoreRange(-1.0, 1.0))
    assert (found.difference, found.low, found.high, found.p_value) == (None, -2.0, 2.0, 1.0)
    assert found.verdict is not ComparisonVerdict.WORSE
    assert "2 attempts are unjudged" in found.describe()


@pytest.mark.slow
def test_many_equal_candidates_give_a_winner_in_no_more_than_one_of_twenty() -> None:
    winners = 0
    for seed in range(100):
        same = {str(number): agent(0.5, 10, attempts=2, seed=seed * 10 + number) for number in range(4)}
        winners += rank(same).winner is not None
    assert winners <= 5


def test_p_values_are_corrected_over_all_pairs() -> None:
    sides = {"a": marks(*[1.0] * 7), "b": marks(*[0.0] * 7), "c": marks(*[0.5] * 7)}
    assert rank(sides).pair("a", "b").p_value == pytest.approx(3 * 2 / 2**7)


def test_a_single_candidate_has_a_score_and_no_winner() -> None:
    found = rank({"alone": marks(1.0, 0.0, 1.0)})
    assert (found.winner, found.first, found.pairs) == (None, ("alone",), ())
    assert found.scores[0].low < 2 / 3 < found.scores[0].high
