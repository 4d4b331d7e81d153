"""The release policy: fair bets, decisions that follow the rules, and the error rates that it states.

The error rates are measured by simulation over the product's own decision code; `benchmarks/release.py` measures more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from ratchet.trainer.release.evidence import HarmEvidence, Outcome
from ratchet.trainer.release.policy import (
    ReleaseAction,
    ReleaseRules,
    ReleaseState,
    decide,
    is_cause_unresolved,
    shares_of,
)
from ratchet.trainer.release.release_evidence import (
    deserved_round_size,
    detectable_loss,
    is_traffic_too_small,
    mean_difference,
)
from tests.harness.releases.contenders import GuardedRelease, Ungated
from tests.harness.releases.series import play, play_many
from tests.harness.releases.world import World

RULES = ReleaseRules()
SERIES = 120  # with 41, the median for a loss of 0.10 has a standard error of about 240
LEARNT = [0.0, 1.0] * 6  # earlier scores, from which the scale is known


def _evidence(shares: dict[int, float], relative: bool = False) -> HarmEvidence:
    evidence = HarmEvidence(min(shares), relative=relative)
    peers = (0.5, 1) if relative else (0.0, 0)
    evidence.count(Outcome(min(shares), {min(shares): 1.0}, score, *peers) for score in LEARNT)
    evidence.begin(max(shares))
    return evidence


@pytest.mark.parametrize("shares", [{0: 0.55, 1: 0.45}, {0: 0.1, 3: 0.9}, {0: 0.1, 1: 0.45, 2: 0.45}])
@pytest.mark.parametrize("grouped", [True, False])
def test_between_versions_that_behave_alike_the_mean_evidence_over_all_coins_is_one(
    shares: dict[int, float], grouped: bool
) -> None:
    scores = [1.0, 0.0, 0.3, 1.0, 0.9]
    mean, mean_gain = 0.0, 0.0
    for versions in product(shares, repeat=len(scores)):
        evidence = _evidence(shares)
        chance = 1.0
        outcomes = []
        for version, score in zip(versions, scores, strict=True):
            chance *= shares[version]
            peers = (sum(scores) - score, len(scores) - 1) if grouped else (0.0, 0)
            outcomes.append(Outcome(version, shares, score, *peers, finished=score > 0.2, error_rate=score / 2))
        evidence.count(outcomes)
        mean += chance * evidence.harm(max(shares))
        mean_gain += chance * evidence.anchor_gain
    assert mean == pytest.approx(1.0, abs=1e-9)
    assert mean_gain == pytest.approx(1.0, abs=1e-9)


def test_between_versions_that_behave_alike_the_evidence_of_ranks_is_one_on_average() -> None:
    shares, scores, mean = {0: 0.55, 1: 0.45}, [0.9, 0.7, 0.4, 0.1], 0.0
    for versions in product(shares, repeat=len(scores)):
        evidence, chance = _evidence(shares, relative=True), 1.0
        evidence.count(_ranked(versions, scores, shares))
        for version in versions:
            chance *= shares[version]
        mean += chance * evidence.harm(1)
    assert mean == pytest.approx(1.0, abs=1e-9)


def test_ranks_show_a_version_that_is_always_last_and_a_lone_trajectory_says_nothing() -> None:
    shares = {0: 0.55, 1: 0.45}
    evidence = _evidence(shares, relative=True)
    evidence.count([Outcome(1, shares, 0.1), Outcome(0, shares, 0.9)])
    assert evidence.harm(1) == 1.0
    for _ in range(40):
        evidence.count(_ranked((0, 1, 0, 1), [0.51, 0.21, 0.5, 0.2], shares))
    assert evidence.harm(1) > 1000


def _ranked(versions: Sequence[int], scores: Sequence[float], shares: dict[int, float]) -> list[Outcome]:
    total, others = sum(scores), len(scores) - 1
    return [
        Outcome(version, shares, score, total - score, others) for version, score in zip(versions, scores, strict=True)
    ]


def test_a_version_in_its_ramp_is_compared_with_the_live_one_and_an_older_one_with_the_anchor() -> None:
    shares = {0: 0.1, 5: 0.45, 6: 0.45}
    evidence = _evidence({0: 0.5, 5: 0.5})
    evidence.begin(6)
    for i in range(200):  # the anchor and 6 do well, 5 does badly
        version = (0, 5, 6)[i % 3]
        evidence.count([Outcome(version, shares, float(version != 5 or i % 7 == 0))])
    assert evidence.harm(6) < 1.0 < evidence.harm(5)


def test_a_version_whose_trajectories_hang_is_found_though_it_scores_well_when_it_ends() -> None:
    shares = {0: 0.55, 1: 0.45}
    evidence = _evidence(shares)
    for i in range(400):
        hangs = i % 2 == 1 and i % 5 == 0
        evidence.count([Outcome(i % 2, shares, score=0.5, finished=float(not hangs))])
    assert evidence.harm_by_stream(1)["score"] < 1000 <= evidence.harm_by_stream(1)["finished"] / 10
    assert evidence.harm(1) >= 1000


def test_outcomes_of_before_a_release_say_nothing_about_it() -> None:
    evidence = _evidence({0: 0.1, 1: 0.9})
    evidence.begin(2)
    evidence.count([Outcome(i % 2, {0: 0.1, 1: 0.9}, float(i % 2 == 0)) for i in range(50)])
    assert evidence.harm(2) == 1.0 < evidence.harm(1)


def test_the_interval_of_live_minus_anchor_holds_the_true_difference_and_narrows() -> None:
    evidence = _evidence({0: 0.3, 1: 0.7})
    widths = []
    for _ in range(2):
        for i in range(1000):
            version = int(i % 10 >= 3)
            evidence.count([Outcome(version, {0: 0.3, 1: 0.7}, float((i // 10) % 10 < 4 + 2 * version))])
        seen = mean_difference(evidence.anchor_difference)
        assert seen is not None
        assert seen.low < 0.2 < seen.high
        widths.append(seen.high - seen.low)
    assert widths[1] < widths[0]


def _state(**changes: object) -> ReleaseState:
    known: dict[str, object] = {"anchor": 3, "live": 5, "round_size": 128, "harm": {5: 0.5}}
    return ReleaseState(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "action", "version"),
    [
        (_state(), ReleaseAction.WAIT, None),
        (_state(candidate=8), ReleaseAction.BEGIN_RAMP, 8),
        (_state(candidate=8, held="a person looks first"), ReleaseAction.WAIT, None),
        (_state(ramp=8, ramp_counted=255, harm={5: 0.5, 8: 0.4}), ReleaseAction.WAIT, None),
        (_state(ramp=8, ramp_counted=256, harm={5: 0.5, 8: 0.4}), ReleaseAction.END_RAMP, 8),
        (_state(ramp=8, ramp_counted=256, harm={5: 0.5, 8: 1.2}), ReleaseAction.WAIT, None),
        (_state(ramp=8, ramp_counted=3072, harm={5: 0.5, 8: 1.2}), ReleaseAction.END_RAMP, 8),
        (_state(ramp=8, ramp_counted=400, round_size=1024, harm={5: 0.5, 8: 0.1}), ReleaseAction.WAIT, None),
        (_state(ramp=8, ramp_counted=9999, harm={5: 0.5, 8: 0.1}, held="jump"), ReleaseAction.WAIT, None),
        (_state(anchor_gain=20.0), ReleaseAction.MOVE_ANCHOR, 5),
        (_state(anchor_gain=20.0, harm={5: 2.0}), ReleaseAction.WAIT, None),
        (_state(anchor_gain=20.0, held="jump"), ReleaseAction.WAIT, None),
        (_state(anchor_gain=50.0, live=3, harm={}), ReleaseAction.WAIT, None),
        (_state(shares={3: 0.1, 5: 0.9}, harm={5: 1.5}), ReleaseAction.CHANGE_SHARES, 5),
        (_state(shares={3: 0.1, 5: 0.9}), ReleaseAction.WAIT, None),
    ],
)
def test_each_decision_follows_from_the_state(state: ReleaseState, action: ReleaseAction, version: int | None) -> None:
    decision = decide(state, RULES)
    assert (decision.action, decision.version) == (action, version), decision.reason


def test_a_rollback_in_the_ramp_returns_to_the_live_version_and_a_later_one_to_the_anchor() -> None:
    in_ramp = decide(_state(ramp=8, harm={4: 0.2, 5: 0.5, 8: 1000.0}), RULES)
    later = decide(_state(ramp=8, harm={4: 0.2, 5: 1000.0, 8: 0.5}, held="even while a person looks"), RULES)
    assert (in_ramp.action, in_ramp.target) == (ReleaseAction.ROLLBACK, 5)
    assert (later.action, later.target) == (ReleaseAction.ROLLBACK, 3)


def test_the_shares_are_those_of_anchor_live_and_ramp() -> None:
    assert shares_of(3, 3, None, 1.0, RULES) == {3: 1.0}
    assert shares_of(3, 3, 4, 9.0, RULES) == pytest.approx({3: 0.55, 4: 0.45})
    assert shares_of(3, 5, None, 0.5, RULES) == pytest.approx({3: 0.1, 5: 0.9})
    assert shares_of(3, 5, 8, 0.5, RULES) == pytest.approx({3: 0.1, 5: 0.45, 8: 0.45})
    assert shares_of(3, 5, 8, 1.5, RULES) == pytest.approx({3: 0.3, 5: 0.35, 8: 0.35})


def test_two_rollbacks_in_ten_releases_point_to_a_cause_that_stays() -> None:
    assert not is_cause_unresolved([True] + [False] * 9 + [True])
    assert is_cause_unresolved([False] * 5 + [True] + [False] * 8 + [True])


def test_the_detectable_loss_is_stated_as_in_the_documents() -> None:
    assert detectable_loss(300, 1, 0.5, 0.3, 0.7) == pytest.approx(0.27, abs=0.005)
    assert detectable_loss(300, 30, 0.5, 0.1, 0.9) == pytest.approx(0.075, abs=0.002)
    assert is_traffic_too_small(50, 0.5)
    assert not is_traffic_too_small(300, 0.5)


def test_the_deserved_round_is_a_day_of_traffic_within_bounds() -> None:
    assert [deserved_round_size(per_day) for per_day in (50.0, 300.0, 30_000.0)] == [128, 300, 512]


def test_a_version_that_loses_0_30_is_rolled_back_in_its_ramp_and_training_goes_on_without_it() -> None:
    series = play(World("planted", size=0.3, length=0.3), GuardedRelease(World()), seed=1)
    assert series.rollbacks == 1
    assert series.false_rollbacks == 0
    assert series.found_after[10] <= 400
    assert series.final == 0.5


@pytest.mark.slow
def test_equal_versions_are_rarely_rolled_back() -> None:
    figures = play_many(World("equal"), GuardedRelease, range(SERIES))
    assert figures["series_with_a_rollback"] <= 0.05  # type: ignore[operator]
    assert figures["made"] > 42  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "most", "length"), [(0.3, 200, 0.35), (0.1, 2000, 0.6)])
def test_losses_are_found_in_the_stated_time(loss: float, most: int, length: float) -> None:
    """What is not found in the series counts as found later, which leaves the median as it is."""
    figures = play_many(World("planted", size=loss, length=length), GuardedRelease, range(SERIES))
    assert figures["median"] is not None
    assert figures["median"] <= most


@pytest.mark.slow
def test_without_harmful_versions_learning_is_hardly_slower() -> None:
    world = World("mixed", harmful=0.0)
    guarded, ungated = play_many(world, GuardedRelease, range(20)), play_many(world, lambda _: Ungated(), range(20))
    assert guarded["final"] >= 0.97 * ungated["final"]  # type: ignore[operator]
