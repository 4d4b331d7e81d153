"""The second judge is compared with the first and never scores; disagreement is an alarm."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from ratchet.store.records import Transcript
from ratchet.store.store import Store
from ratchet.trainer.judges.judge_runner import (
    JudgeRunner,
    PairedJudgements,
    SecondJudge,
    agreement,
    in_sample,
)
from ratchet.trainer.judges.judgement import DraftVerdict, GroupJudgement
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.sentinel.sentinel import Sentinel
from ratchet.trainer.settings.trainer_settings import SentinelSettings
from tests.harness.records import answered_trajectory
from tests.harness.trainer import judge_samples

SETTINGS = SentinelSettings(interval_seconds=1.0)


class Contrary:
    """Gives the last member the best score."""

    name, version, concurrency = "contrary", "1", 1

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        if self._gate is not None:
            self._gate.wait()
        opinions = [DraftVerdict.of(float(place)) for place in range(len(members))]
        return GroupJudgement(
            tuple(
                opinion.verdict(member, group_id, judge=self.name, version="1", judged_at=1.0)
                for opinion, member in zip(opinions, members, strict=True)
            )
        )

    def close(self) -> None:
        pass


def form(store: Store, count: int) -> list[str]:
    """So many ready groups; the first judge likes the first member of each."""
    for number in range(count):
        names = [f"g{number:02}-{place}" for place in range(3)]
        for place, name in enumerate(names):
            judge_samples.by_answer[name] = -float(place)
            answered_trajectory(store, name, name, task=f"t{number}")
        store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
        store.groups.create(f"task:t{number}", "agent", names, now=101.0)
    return [group.id for group in store.groups.awaiting_verdict("agent", 102.0)]


def keeper(store: Store, second: SecondJudge) -> JudgeRunner:
    first = FunctionJudge("tests.harness.trainer.judge_samples:scripted")
    return JudgeRunner(store, first, attempts=1, retry_seconds=1.0, alarm_after=5, second=second)


@pytest.mark.slow
def test_judges_that_disagree_are_an_alarm_and_the_first_ones_scores_count(store: Store) -> None:
    ids = form(store, 20)
    second = SecondJudge(Contrary(), 1.0, store, "agent", "1")
    keep = keeper(store, second)
    watching = Sentinel(SETTINGS, store, "agent", second=second)
    for number, name in enumerate(ids, 1):
        keep.submit([store.groups.get(name)], store.trajectories.read)
        assert keep.collect_results(102.0, 60.0) == 1
        assert eventually(partial(judgements, second, number))
    watching.check(102.0)
    keep.close()
    later = SecondJudge(Contrary(), 1.0, store, "agent", "1")
    assert [one.group_id for one in later.paired_judgements()] == ids, "a restart forgets nothing"
    assert agreement(later.paired_judgements(), "contrary") == agreement(second.paired_judgements(), "contrary")
    assert SecondJudge(Contrary(), 1.0, store, "agent", "2").paired_judgements() == (), (
        "beside another first judge it said nothing"
    )
    later.close()
    reasons = {alarm.name: alarm.reason for alarm in store.alarms.active()}
    assert re.search(r"second judge contrary .* last 20 groups", reasons["second_judge:agent"])
    assert "Kendall's tau -1.00" in reasons["second_judge:agent"]
    assert {verdict.judge for name in ids for verdict in store.groups.verdict_history(name)} == {
        "tests.harness.trainer.judge_samples:scripted"
    }


@pytest.mark.slow
def test_a_slow_second_judge_holds_nobody_up(store: Store) -> None:
    form(store, 30)
    gate = threading.Event()
    second = SecondJudge(Contrary(gate), 1.0, store, "agent", "1")
    keep = keeper(store, second)

    def all_judged() -> bool:
        keep.submit(store.groups.awaiting_verdict("agent", 102.0), store.trajectories.read)
        keep.collect_results(102.0, 0.5)
        return not store.groups.awaiting_verdict("agent", 102.0)

    try:
        assert eventually(all_judged)
        assert second.paired_judgements() == ()
    finally:
        gate.set()
        keep.close()


def judgements(second: SecondJudge, count: int) -> bool:
    return len(second.paired_judgements()) == count


def eventually(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether it holds in time."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def scores(*values: float) -> tuple[float, ...]:
    return values


def test_agreement_is_counted_in_pairs_and_small_samples_raise_nothing() -> None:
    same = [PairedJudgements(f"g{n}", scores(0, 1, 2), scores(0.1, 0.5, 0.9)) for n in range(20)]
    assert agreement(same, "second")[0].value == 1.0
    turned = [PairedJudgements(f"g{n}", scores(0, 1, 2), scores(0.9, 0.5, 0.1)) for n in range(19)]
    (found,) = agreement(turned, "second")
    assert (found.value, found.reason) == (-1.0, None)
    assert agreement([], "second") == []


def test_a_noisy_judge_agrees() -> None:
    noise = random.Random(3)
    judgements = []
    for number in range(100):
        first = scores(*(noise.random() for _ in range(4)))
        judgements.append(PairedJudgements(f"g{number}", first, [one + noise.gauss(0, 0.2) for one in first]))
    (found,) = agreement(judgements, "second")
    assert found.value > 0.4
    assert found.reason is None


def test_failures_of_a_second_judge_are_reported() -> None:
    judgements = [PairedJudgements(f"g{n}", scores(0, 1), None) for n in range(15)] + [
        PairedJudgements("g", scores(0, 1), scores(0, 1))
    ] * 5
    (found,) = agreement(judgements, "second")
    assert "15 of the last 20 groups" in str(found.reason)


def test_the_sample_has_its_share_and_depends_on_ids_alone() -> None:
    ids = [f"grp_{number}" for number in range(4000)]
    sampled = [name for name in ids if in_sample(name, 0.1)]
    assert 320 < len(sampled) < 480
    assert set(sampled) < {name for name in ids if in_sample(name, 0.3)}
    assert all(in_sample(name, 1.0) for name in ids)
