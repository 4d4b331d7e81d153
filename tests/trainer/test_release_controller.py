"""The release of versions that serve decides on what the store holds, also after a kill or a decision of a person."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest

from ratchet.store.records import Verdict, VersionDraw
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.release.policy import ReleaseRules, shares_of
from ratchet.trainer.release.release_evidence import UNIT_SECONDS, OutcomeCounter, UsualDuration
from ratchet.trainer.settings.trainer_settings import ReleaseSettings
from tests.harness.records import call_start, ended, tool_call
from tests.harness.trainer.releases import make_release

SETTINGS = {"ramp": 32}
_numbers = itertools.count()


class ReleaseTraffic:
    """An alias with traffic: each trajectory draws by the shares in force and scores by its version's rate."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.store = store
        self.settings = ReleaseSettings(**(SETTINGS | settings))
        self.random = random.Random(5)
        self.at = time.time()
        self.restart()

    def restart(self) -> None:
        self.controller = make_release(self.store, release=self.settings, groups_per_round=4, num_generations=2)

    def candidate(self) -> int:
        version = self.store.rounds.next_version("agent")
        self.store.rounds.adopt(
            "agent", version=version, checkpoint=f"v{version}", origin={}, reason="test", by_trainer=True
        )
        return version

    def ramp(self) -> int:
        """Begin the ramp of a new version, as its publication does."""
        candidate = self.store.policies.get("agent", self.candidate())
        self.check()
        share = self.controller.ramp_share(candidate)
        assert share is not None
        self.store.policies.start_ramp("agent", candidate.version, share)
        return candidate.version

    def check(self) -> bool:
        self.at += 10.0
        return self.controller.check(self.at)

    def traffic(self, rates: Mapping[int, float], count: int, unit: str | None = None) -> None:
        """Serve `count` trajectories, a multiple of 4, in judged groups of 4."""
        policies = [policy for policy in self.store.policies.serving() if policy.alias == "agent"]
        shares = {policy.version: policy.share or 0.0 for policy in policies}
        live = next(policy.version for policy in policies if policy.state is PolicyState.LIVE)
        shares[live] = 1.0 - sum(shares.values())
        for _ in range(count // 4):
            drawn = self.random.choices(list(shares), list(shares.values()), k=4)
            self._group(drawn, rates, VersionDraw(shares=shares, unit=unit))

    def _group(self, drawn: list[int], rates: Mapping[int, float], draw: VersionDraw) -> None:
        names = [f"t{next(_numbers)}" for _ in drawn]
        starts = []
        for name, version in zip(names, drawn, strict=True):
            self.at += 1.0
            starts.append(call_start(f"call_{name}", name, at=self.at, version=version, task="t/1", draw=draw))
        self.store.calls.ship([ended(start, tool_call()) for start in starts])
        for name in names:
            self.store.trajectories.seal(name, now=self.at)
        group = self.store.groups.create("task:t", "agent", names, now=self.at)
        scores = [float(self.random.random() < rates[version]) for version in drawn]
        self.store.groups.record_verdicts(
            group.id,
            [
                Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=score)
                for name, score in zip(names, scores, strict=True)
            ],
        )

    def until_decided(self, rates: Mapping[int, float], most: int = 40) -> int:
        for batch in range(most):
            self.traffic(rates, 16)
            if self.check():
                return 16 * (batch + 1)
        return 0

    def states(self) -> dict[int, str]:
        return {policy.version: str(policy.state) for policy in self.store.policies.all("agent")}

    def newest(self, action: PolicyAction) -> Any:
        found = (one for one in self.store.decisions.decisions_of("agent") if one.action is action)
        return next(found, None)


def test_a_harmful_version_is_rolled_back_in_its_ramp_with_its_descendants(store: Store) -> None:
    releases = ReleaseTraffic(store)
    assert releases.ramp() == 1
    releases.candidate()
    assert releases.until_decided({0: 1.0, 1: 0.0}) <= 96
    assert releases.states() == {0: "live", 1: "rejected", 2: "rejected"}
    decision = releases.newest(PolicyAction.ROLLBACK)
    assert decision.decided_by == "release"
    assert decision.evidence["harm"]["1"] >= 1000
    assert "0 does better than 1 in its ramp" in decision.reason


def test_after_its_ramp_a_version_is_live_the_former_one_is_held_back_and_the_next_has_three_beside_each_other(
    store: Store,
) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    assert releases.until_decided({0: 0.4, 1: 0.6})
    assert releases.states() == {0: "holdback", 1: "live"}
    assert releases.ramp() == 2
    assert releases.states() == {0: "holdback", 1: "live", 2: "ramp"}
    shares = {policy.version: policy.share for policy in store.policies.serving()}
    assert shares == pytest.approx({0: 0.1, 1: None, 2: 0.45})


@pytest.mark.slow
def test_the_anchor_moves_to_a_version_that_is_shown_to_be_better(store: Store) -> None:
    releases = ReleaseTraffic(store, max_gain=None)
    releases.ramp()
    for _ in range(3):
        releases.until_decided({0: 0.0, 1: 1.0})
    assert releases.states() == {0: "retired", 1: "live"}
    assert releases.newest(PolicyAction.ANCHOR).evidence["anchor_gain"] >= 20


def test_a_live_version_that_turns_out_harmful_goes_back_to_the_anchor_with_all_after_it(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    assert releases.until_decided({0: 0.5, 1: 0.5})
    assert releases.states()[1] == "live"
    releases.ramp()
    for _ in range(20):
        releases.until_decided({0: 1.0, 1: 0.0, 2: 0.0}, most=4)
        if releases.states()[1] == "rejected":
            break
    assert releases.states() == {0: "live", 1: "rejected", 2: "rejected"}


def test_a_controller_that_was_killed_decides_as_one_that_was_not(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    rates = {0: 0.9, 1: 0.1}
    for _ in range(40):
        releases.traffic(rates, 8)
        before = releases.controller
        if before.check(releases.at):
            break
        evidence = before._counter.evidence
        releases.restart()
        assert not releases.controller.check(releases.at)
        again = releases.controller._counter.evidence
        assert again.harm(1) == pytest.approx(evidence.harm(1))
        assert again.counted_in_ramp == evidence.counted_in_ramp
        releases.at += 10.0
    assert releases.states()[1] == "rejected"


def test_a_gain_that_is_too_large_waits_for_a_person_and_the_ramp_goes_on(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    assert releases.until_decided({0: 0.0, 1: 1.0})
    held = releases.newest(PolicyAction.HOLD)
    assert "exceeds max_gain 0.5" in held.reason
    assert releases.states() == {0: "live", 1: "ramp"}
    assert releases.controller.is_publishing_blocked
    assert not releases.until_decided({0: 0.0, 1: 1.0}, most=2)
    store.policies.promote_manually("agent", None, by="anna", reason="read fifty")
    releases.check()
    assert releases.states() == {0: "retired", 1: "live"}, "it is the anchor at once: its evidence was clear"
    assert not [alarm for alarm in store.alarms.active() if alarm.name.startswith("approval_required")]


def test_a_pinned_version_stays_and_nothing_is_decided(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    store.policies.pin("agent", 0, by="anna", reason="a demonstration")
    assert not releases.until_decided({0: 1.0}, most=2)
    assert releases.controller.is_publishing_blocked


def test_two_rollbacks_in_ten_releases_pause_training_until_a_person_decides(store: Store) -> None:
    releases = ReleaseTraffic(store)
    for _ in range(2):
        assert not releases.controller.pauses_training
        version = releases.ramp()
        assert releases.until_decided({0: 1.0, version: 0.0})
    releases.check()
    assert releases.controller.pauses_training
    assert any(alarm.name == "repeated_rollbacks:agent" for alarm in store.alarms.active())
    store.policies.pin("agent", 0, by="anna", reason="the judge was fooled")
    store.policies.unpin("agent", by="anna", reason="it is another one now")
    releases.check()
    assert not releases.controller.pauses_training


def test_with_the_policy_immediate_versions_have_no_ramp(store: Store) -> None:
    releases = ReleaseTraffic(store, policy="immediate")
    candidate = store.policies.get("agent", releases.candidate())
    releases.check()
    assert releases.controller.ramp_share(candidate) is None


def test_a_ramp_that_began_before_the_policy_was_immediate_ends_at_once(store: Store) -> None:
    ReleaseTraffic(store).ramp()
    releases = ReleaseTraffic(store, policy="immediate")
    assert releases.check()
    assert releases.states()[1] == "live"


def test_releases_are_immediate_while_a_process_trains_on_tasks_and_guarded_once_it_is_gone(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.controller = make_release(store, release=ReleaseSettings())
    lease = f"tuning:{store.tunings.begin('weights', 'agent', {}).id}"
    assert store.leases.acquire(lease, "host:1_06f3", 600.0)
    releases.check()
    assert releases.controller.is_immediate
    store.leases.release(lease, "host:1_06f3")  # as if it had expired: the run is `running` as before
    releases.check()
    assert not releases.controller.is_immediate


def test_what_is_known_about_a_release_is_stored_for_people(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    releases.traffic({0: 0.5, 1: 0.5}, 24)
    releases.check()
    known = {one.version: one.evidence for one in store.releases.evidence("agent")}
    assert known[1]["counted"] == 24
    assert known[1]["ramp_length"] == 32
    assert known[1]["detectable"]["day"] > known[1]["detectable"]["month"] > 0
    assert "24 of 32 trajectories" in str(known[1]["status"])
    assert shares_of(0, 0, 1, 1.0, ReleaseRules.of(releases.settings))[1] == pytest.approx(0.45)


def test_the_trajectories_of_one_user_are_one_bet(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    counter = OutcomeCounter(store, "agent", "1", relative=False, deadline_seconds=1e9)
    counter.begin(0, {1: releases.at}, frozenset(), releases.at)
    releases.traffic({0: 1.0, 1: 0.0}, 8)
    releases.traffic({0: 1.0, 1: 0.0}, 40, unit="someone")
    counter.read(releases.at + 1.0)
    assert counter.evidence.counted == 8, "the user's bet is open"
    releases.at += UNIT_SECONDS
    releases.traffic({0: 1.0, 1: 0.0}, 4, unit="someone")
    releases.traffic({0: 1.0, 1: 0.0}, 4)
    counter.read(releases.at + 1.0)
    assert counter.evidence.counted == 8 + 1 + 4, "one bet for the user, and none for what came later"


def test_a_trajectory_that_hangs_holds_up_the_others_for_minutes_and_its_late_success_is_none(store: Store) -> None:
    releases = ReleaseTraffic(store)
    releases.ramp()
    began = releases.at

    def recounted() -> OutcomeCounter:
        counter = OutcomeCounter(store, "agent", "1", relative=False, deadline_seconds=6 * 3600.0)
        counter.begin(0, {1: began}, frozenset(), began)
        counter.read(releases.at + 1.0)
        assert counter.is_current
        return counter

    releases.traffic({0: 0.5, 1: 0.5}, 40)
    releases.at += 1.0
    hangs = call_start("hangs", "hangs", at=releases.at, version=1, draw=VersionDraw(shares={0: 0.55, 1: 0.45}))
    store.calls.ship([hangs])
    releases.traffic({0: 0.5, 1: 0.5}, 40)
    assert recounted().evidence.counted == 40
    releases.at += 901.0
    counter = recounted()
    assert counter.evidence.counted == 81, "after 15 minutes it counts, as the worst score"
    assert counter.evidence.harm_by_stream(1)["finished"] != 1.0
    store.calls.ship([ended(hangs, tool_call(), ended_at=releases.at)])
    store.trajectories.seal("hangs", now=releases.at)
    store.trajectories.drop(["hangs"], "ungrouped")
    assert recounted().evidence.harm(1) == pytest.approx(counter.evidence.harm(1))


def test_the_deadline_is_ten_times_the_usual_duration_within_bounds() -> None:
    def after(durations: list[float]) -> float:
        usual = UsualDuration(21_600.0)
        for seconds in durations:
            usual.add(seconds)
        return usual.deadline

    assert after([1.0] * 19) == 21_600.0, "too few to tell"
    assert after([1.0] * 20) == 900.0
    assert after([300.0] * 100) == 3000.0
    assert after([300.0] * 91 + [1e9] * 9) == 3000.0, "one in ten may hang"
    assert after([7200.0] * 100) == 21_600.0
    assert after([7200.0] * 100 + [60.0] * 512) == 900.0
    assert UsualDuration(60.0).deadline == 60.0
