"""Cohorts: ungrouped trajectories of a new task family are compared with others of the same system prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Trajectory, Verdict
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.advantages import AdvantageEstimator, ScoreHistory, cohort_advantages, past_score
from ratchet.trainer.collect.collector import RoleResolver, TrajectoryCollector
from ratchet.trainer.collect.grouping import cohort_key, plan_cohorts
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.statistics import has_signal
from tests.harness.records import call_start, ended
from tests.harness.trainer import judge_samples
from tests.harness.trainer.stepped_controller import SteppedController
from tests.trainer.test_grouping import run


def cohorts(
    ungrouped: Sequence[Trajectory], now: float = 61.0, **changes: Any
) -> tuple[list[tuple[str, ...]], set[str]]:
    keys = {one.id: one.root_node for one in ungrouped}
    values: dict[str, Any] = {"with_baseline": set(), "size": 3, "min_size": 2, "wait_seconds": 60.0} | changes
    groups, waiting = plan_cohorts(ungrouped, keys=keys, now=now, **values)
    return [group.members for group in groups], waiting


def test_ungrouped_trajectories_with_one_system_prompt_form_a_cohort() -> None:
    ungrouped = [run(str(n), task=f"mail/{n}") for n in range(4)] + [run("x", task="mail/9", root_node="another")]
    assert cohorts(ungrouped, now=1.0) == ([("0", "1", "2")], {"3", "x"})
    assert cohorts(ungrouped) == ([("0", "1", "2")], set())  # too few are left: each goes by itself
    assert cohorts(ungrouped[:2]) == ([("0", "1")], set())


def test_a_family_with_a_past_needs_no_cohort() -> None:
    ungrouped = [run(str(n), task=f"mail/{n}") for n in range(4)]
    assert cohorts(ungrouped, with_baseline={"task:mail"}) == ([], set())


def test_cohorts_differ_by_tools_prompt_and_family() -> None:
    keys = {
        cohort_key(one, prompt)
        for one in (run("a", task="mail/1"), run("b", task="mail/2"), run("c", task="math/1"))
        for prompt in (b"be brief", b"be kind")
    }
    assert len(keys) == 4
    assert cohort_key(run("a"), b"x") != cohort_key(run("a", tools_hash="t"), b"x")


@pytest.mark.parametrize("estimator_name", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_each_member_is_compared_with_the_others_alone(estimator_name: str) -> None:
    scores = [0.0, 0.2, 1.0, 0.4]
    found = cohort_advantages(scores, estimator_name)
    raw = [score - statistics.fmean(scores[:n] + scores[n + 1 :]) for n, score in enumerate(scores)]
    scale = raw[0] / found[0]
    assert [value * scale for value in found] == pytest.approx(raw)
    assert scale == pytest.approx(statistics.stdev(scores) + 1e-4 if estimator_name == "grpo" else 1.0)
    assert not has_signal([0.5, 0.5])
    assert cohort_advantages([0.5, 0.5], estimator_name) == (0.0, 0.0)


def test_the_baseline_of_a_member_does_not_change_with_its_own_score() -> None:
    low, high = (cohort_advantages([score, 0.3, 0.9], "dr_grpo")[0] - score for score in (0.0, 1.0))
    assert low == pytest.approx(high)


def test_a_group_of_different_tasks_is_a_cohort() -> None:
    members = [run(str(n), task=f"mail/{n}") for n in range(3)]
    verdicts = [
        Verdict(trajectory_id=one.id, group_id="g", judge="j", judge_version="1", score=score)
        for one, score in zip(members, (0.0, 0.0, 1.0), strict=True)
    ]
    estimator = AdvantageEstimator("dr_grpo")
    assert estimator.advantages(members, verdicts) == pytest.approx((-0.5, -0.5, 1.0))
    same = [run(str(n)) for n in range(3)]
    assert estimator.advantages(same, verdicts) == pytest.approx((-1 / 3, -1 / 3, 2 / 3))
    assert any(estimator.advantages(members, verdicts) or ())


def single(store: Store, number: int, answer: str, system: str = "Answer.") -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Where is {number}?"}]
    start = call_start(
        f"call_{number}", f"traj_{number}", messages, at=time.time() - 9.0 + number / 10, task=f"mail/{number}"
    )
    reply = {"role": "assistant", "content": answer}
    # Of equal tokens with advantages that cancel out nothing could be learnt.
    store.calls.ship([ended(start, reply, messages=messages, ids=(8, 9) if answer == "good" else (4, 5))])


@pytest.fixture
def assembly(store: Store, tmp_path: Path) -> Iterator[Callable[[ScoreHistory], TrajectoryCollector]]:
    made: list[TrajectoryCollector] = []

    def make(book: ScoreHistory) -> TrajectoryCollector:
        settings = TrainerSettings(
            store="x", model="agent", base_model="base", vllm=("http://127.0.0.1:1",), checkpoints=tmp_path,
            judge="a:b", ungrouped="cohort", min_baseline_samples=2, num_generations=3, group_wait_seconds=0.01,
        )  # fmt: skip
        made.append(TrajectoryCollector(store, settings, RoleResolver(store, "agent", Roles()), book, None))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_family_with_enough_scores_uses_its_baseline(
    store: Store, assembly: Callable[[ScoreHistory], TrajectoryCollector]
) -> None:
    for number in range(3):
        single(store, number, "a")
    single(store, 3, "a", system="Another agent's.")
    store.trajectories.seal_idle_trajectories("agent", time.time(), 0.1)
    assembly(book := ScoreHistory()).step(time.time() + 1.0, time.time())
    sizes = sorted(len(group.members) for group in store.groups.awaiting_verdict("agent", time.time()))
    assert sizes == [1, 3]
    verdict = Verdict(trajectory_id="x", group_id="g", judge="j", judge_version="1", score=0.5)
    for number in (0, 1):
        book.add(past_score(store.trajectories.get(f"traj_{number}"), verdict))
    for number in range(4, 7):
        single(store, number, "a")
    store.trajectories.seal_idle_trajectories("agent", time.time(), 0.1)
    assembly(book).step(time.time() + 1.0, time.time())
    sizes = sorted(len(group.members) for group in store.groups.awaiting_verdict("agent", time.time()))
    assert sizes == [1, 1, 1, 1, 3]


def test_a_family_without_a_past_is_learnt_from_at_once(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    judge_samples.by_answer |= {"good": 1.0, "bad": 0.0}
    for number in range(4):
        single(store, number, "good" if number % 2 else "bad")
    controller = make_controller(
        ungrouped="cohort", num_generations=4, groups_per_round=1, group_wait_seconds=0.01, seal_after_idle_seconds=0.1
    )
    until = time.monotonic() + 60
    while not store.rounds.newest_committed("agent"):
        controller.step(time.time())
        assert time.monotonic() < until
    states = {one.state for one in store.trajectories.page()}
    assert states == {TrajectoryState.TRAINED}
