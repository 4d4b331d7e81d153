"""Groups that wait for their round, and the running baseline of ungrouped trajectories."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import write
from ratchet.store.reasons import DropReason
from ratchet.store.records import Group, PastScore, Verdict
from ratchet.store.states import GroupState, PolicyState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.advantages import SHRINKAGE, AdvantageEstimator, ScoreHistory, past_score
from ratchet.trainer.judges.judge_runner import JudgeRunner
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.rounds.backlog import Backlog, is_drained
from ratchet.trainer.settings.trainer_settings import MAX_SCORES_PER_FAMILY, TrainerSettings
from tests.harness.records import commit_round
from tests.harness.trainer.agents import agents_work

A_ROUND = 16  # groups


def backlog(store: Store, **changes: Any) -> Backlog:
    values: dict[str, Any] = {
        "store": "s", "model": "agent", "base_model": "b", "vllm": ("http://127.0.0.1:1",), "checkpoints": Path("c"),
        "judge": "a:b", "num_generations": 2, "groups_per_round": A_ROUND,
    }  # fmt: skip
    return Backlog(store, TrainerSettings(**(values | changes)))


def arrive(store: Store, version: int, count: int, first: int, *, judged: bool = True) -> None:
    """Groups of two trajectories that a version sampled, as agents and a judge leave them."""
    with write(store.groups._engine) as connection:
        for number in range(first, first + count):
            name, state = f"grp_{number:08d}", GroupState.JUDGED if judged else GroupState.READY
            connection.execute(
                sa.insert(schema.groups).values(id=name, key="k", alias="agent", state=state, formed_at=float(number))
            )
            runs = [
                {
                    "id": f"{name}-{member}", "alias": "agent", "version": version, "state": TrajectoryState.GROUPED,
                    "root_node": "r", "tools_hash": "", "opened_at": 0.0, "last_active_at": 0.0, "group_id": name,
                    "purpose": "live",
                }
                for member in "ab"
            ]  # fmt: skip
            connection.execute(sa.insert(schema.trajectories), runs)


def train(store: Store, groups: Sequence[Group], version: int) -> None:
    """What a committed round leaves: its groups consumed, the next version live."""
    commit_round(store, "agent", version + 1, checkpoint=f"c/{version + 1}", groups=[one.id for one in groups])
    store.policies.promote("agent", version + 1, {})


def sampled(store: Store, group: Group) -> int:
    return min(store.trajectories.get(name).version for name in group.members)


@pytest.mark.parametrize(
    "arriving", [16, 64, *(pytest.param(arriving, marks=pytest.mark.slow) for arriving in (32, 128, 300))]
)
def test_what_is_trained_is_new_however_much_arrives(store: Store, arriving: int) -> None:
    waiting, ages = backlog(store, max_staleness=8), []
    for version in range(24):
        arrive(store, version, arriving, first=version * arriving)
        chosen = waiting.newest(waiting.judged())
        assert len(chosen) == A_ROUND
        ages += [version - sampled(store, group) for group in chosen if version >= 12]
        train(store, chosen, version)
    assert statistics.fmean(ages) == 0.0
    dropped = store.groups.drop_counts("agent").get(DropReason.STALE, 0)
    left = len(store.groups.awaiting_round("agent", limit=10_000))
    assert dropped + left == 24 * (arriving - A_ROUND)
    assert left <= 10 * (arriving - A_ROUND)  # nothing waits for ever


def test_groups_too_old_for_training_are_not_judged(store: Store) -> None:
    waiting = backlog(store, max_staleness=2)
    arrive(store, 0, 3, first=0, judged=False)
    for version in range(4):
        arrive(store, version, 1, first=100 + version)
        train(store, store.groups.awaiting_round("agent")[-1:], version)
    arrive(store, 4, 2, first=200, judged=False)
    assert [group.id for group in waiting.groups_to_judge(now=1.0)] == ["grp_00000201", "grp_00000200"]
    assert store.groups.drop_counts("agent") == {DropReason.STALE: 3}
    assert store.trajectories.get("grp_00000000-a").drop_reason == DropReason.STALE


def test_training_waits_while_max_staleness_unproven_versions_are_ahead_and_drops_nothing(store: Store) -> None:
    waiting = backlog(store, max_staleness=2, groups_per_round=1)
    for version in (0, 1):
        arrive(store, 0, 1, first=version)
        groups = waiting.judged()
        assert waiting.is_round_due(waiting.weight(groups), 0.0)
        held = store.rounds.start("agent", version)
        ids = [group.id for group in groups]
        store.rounds.commit(held.id, version=version + 1, checkpoint=f"c/{version}", groups=ids, metrics={})
        store.policies.mark_unproven("agent", version + 1, {}, reason="lost in rounding")
    arrive(store, 0, 1, first=2)
    assert not waiting.is_round_due(waiting.weight(waiting.judged()), 1e9)
    assert not store.groups.drop_counts("agent"), "what the live version samples is not too old yet"
    store.policies.promote("agent", 2, {})
    assert waiting.is_round_due(waiting.weight(waiting.judged()), 0.0)


def test_a_group_that_lost_too_many_members_is_neither_judged_nor_trained(store: Store) -> None:
    waiting = backlog(store, groups_per_round=1)
    alone = agents_work(store, "single", [1.0])
    mixed = agents_work(store, "t", [0.0]) + agents_work(store, "u", [1.0], version=1)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    commit_round(store, "agent", 1, checkpoint="c/1")
    single = store.groups.create("k", "agent", alone, now=101.0)
    group = store.groups.create("k", "agent", mixed, now=101.0)
    for one in (single, group):
        store.groups.record_verdicts(
            one.id,
            [
                Verdict(trajectory_id=name, group_id=one.id, judge="j", judge_version="1", score=float(place))
                for place, name in enumerate(one.members)
            ],
        )
    store.policies.reject("agent", 1, {})
    store.groups.drop_rejected("agent", "rolled_back")
    assert store.policies.get("agent", 1).state is PolicyState.REJECTED
    assert [one.id for one in waiting.judged()] == [single.id]  # what was formed as a single stays one
    assert store.groups.get(group.id).drop_reason == "group_too_small"


def test_traffic_of_another_agent_does_not_keep_one_from_being_drained(store: Store) -> None:
    agents_work(store, "theirs", [1.0], alias="other")
    assert is_drained(store, "agent", num_generations=2, groups_per_round=1)
    assert not is_drained(store, "other", num_generations=2, groups_per_round=1)
    agents_work(store, "ours", [1.0])
    assert not is_drained(store, "agent", num_generations=2, groups_per_round=1)


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
        retry_seconds=1.0, alarm_after=5, estimator=estimator,
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
