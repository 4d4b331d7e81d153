"""Which trajectories become groups, decided as a pure function and on a store."""

from __future__ import annotations

import random
import statistics
from typing import Any

import msgspec
import pytest

from ratchet.store.records import Trajectory
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.advantages import ScoreHistory, group_advantages
from ratchet.trainer.collect.collector import RoleResolver, TrajectoryCollector
from ratchet.trainer.collect.grouping import GroupingPlan, plan_groups
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness import records


def run(name: str, task: str | None = "t", sealed_at: float = 0.0, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "id": name, "alias": "a", "version": 0, "state": TrajectoryState.SEALED, "task": task, "root_node": "r",
        "tools_hash": "", "key_id": None, "opened_at": 0.0, "last_active_at": 0.0, "sealed_at": sealed_at,
    }  # fmt: skip
    return Trajectory(**(values | changes))


def plan(waiting: list[Trajectory], now: float = 1.0) -> GroupingPlan:
    return plan_groups(waiting, size=3, min_size=2, wait_seconds=60.0, now=now)


def test_a_group_forms_as_soon_as_it_is_whole() -> None:
    found = plan([run(str(number)) for number in range(7)])
    assert [group.members for group in found.groups] == [("0", "1", "2"), ("3", "4", "5")]
    assert found.drops == ()


def test_different_tasks_prompts_and_aliases_never_mix() -> None:
    others = [
        run("a"),
        run("b", task="u"),
        run("c", task=None),
        run("d", task=None, root_node="s"),
        run("e", alias="b"),
    ]
    assert plan(others).groups == ()


def test_without_a_task_key_equal_root_prompts_are_one_task() -> None:
    (group,) = plan([run(str(number), task=None) for number in range(3)]).groups
    assert group.members == ("0", "1", "2")


def test_a_small_group_forms_after_the_wait_and_a_single_is_dropped_with_the_reason() -> None:
    waiting = [run("a"), run("b"), run("c", task="alone"), run("d", task="new", sealed_at=50.0)]
    found = plan(waiting, now=61.0)
    assert [run.id for run in found.ungrouped] == ["c"]
    found = found.with_ungrouped(keep=False)
    assert [group.members for group in found.groups] == [("a", "b")]
    assert found.drops == (("c", "ungrouped"),)


def test_a_run_that_a_machine_cut_off_is_nobodys_failure() -> None:
    waiting = [run(str(number)) for number in range(4)]
    found = plan_groups(waiting, size=3, min_size=2, wait_seconds=60.0, now=1.0, cut_off={"1"})
    assert [group.members for group in found.groups] == [("0", "2", "3")]
    assert found.drops == (("1", "cut_off"),)


def test_an_evaluation_is_never_training_data() -> None:
    found = plan([run(str(number), purpose="eval") for number in range(3)])
    assert found.groups == ()
    assert found.drops == (("0", "eval"), ("1", "eval"), ("2", "eval"))


def test_what_a_rollback_at_once_moved_to_another_version_is_never_training_data() -> None:
    found = plan([run("a"), run("b", purpose="moved"), run("c")])
    assert found.drops == (("b", "moved"),)
    assert all("b" not in group.members for group in found.groups)


def test_ungrouped_trajectories_become_groups_of_one_if_kept() -> None:
    waiting = [run("a"), run("b", task="other"), run("new", task="third", sealed_at=50.0)]
    found = plan(waiting, now=61.0).with_ungrouped(keep=True)
    assert [group.members for group in found.groups] == [("a",), ("b",)]
    assert found.drops == ()


def test_a_trajectory_that_waits_for_resamples_is_neither_dropped_nor_grouped() -> None:
    ungrouped = plan([run("a"), run("b", task="other")], now=61.0)
    assert ungrouped.with_ungrouped(keep=False, waiting={"a"}).drops == (("b", "ungrouped"),)
    assert [group.members for group in ungrouped.with_ungrouped(keep=True, waiting={"a"}).groups] == [("b",)]


def test_a_group_waits_for_members_that_began_with_it_and_are_under_way() -> None:
    done = [run(name, opened_at=at, last_active_at=at + 10.0) for name, at in (("a", 0.0), ("b", 2.0), ("d", 3.0))]
    slow = run("c", opened_at=1.0, state=TrajectoryState.OPEN)
    later = [run(name, opened_at=at, last_active_at=at + 10.0) for name, at in (("e", 4.0), ("f", 5.0))]

    def groups(waiting: list[Trajectory], now: float, under_way: list[Trajectory]) -> list[tuple[str, ...]]:
        found = plan_groups(waiting, size=3, min_size=2, wait_seconds=60.0, now=now, under_way=under_way)
        return [group.members for group in found.groups]

    assert groups(done, 20.0, [slow]) == []
    assert groups([*done, *later], 20.0, [slow]) == [("d", "e", "f")]  # it holds up its own group alone
    assert groups(done[:2], 90.0, [slow]) == []  # a single minute is not far longer than the others took
    assert groups(done[:2], 102.0, [slow]) == [("a", "b")]  # and it is not waited for for ever
    sealed = run("c", opened_at=1.0, last_active_at=30.0, sealed_at=30.0)
    assert groups([*done, sealed], 31.0, []) == [("a", "c", "b")]


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.0, 5.0])
def test_who_is_compared_with_whom_does_not_depend_on_how_long_an_attempt_took(between: float) -> None:
    dice = random.Random(7)
    dropped: list[bool] = []
    sizes: list[float] = []
    fast: list[float] = []
    for _ in range(120):
        right = [dice.random() < 0.5 for _ in range(32)]
        starts = [place * between + dice.random() for place in range(32)]
        ended = [at + (60.0 if good else 120.0) + dice.random() for at, good in zip(starts, right, strict=True)]
        for members in _formed(starts, ended):
            advantages = group_advantages([float(right[int(name)]) for name in members])
            dropped += [not any(advantages)] * len(members)
            sizes += map(abs, advantages)
            fast += [value for name, value in zip(members, advantages, strict=True) if right[int(name)]]
    by_chance = [group_advantages([float(dice.random() < 0.5) for _ in range(8)]) for _ in range(5000)]
    assert statistics.fmean(dropped) == pytest.approx(statistics.fmean(not any(one) for one in by_chance), abs=0.015)
    assert statistics.fmean(sizes) == pytest.approx(
        statistics.fmean(abs(a) for one in by_chance for a in one), abs=0.02
    )
    won = [value for one in by_chance for value in one if value > 0 or not any(one)]
    assert statistics.fmean(fast) == pytest.approx(statistics.fmean(won), abs=0.1)


def _formed(starts: list[float], ended: list[float]) -> list[tuple[str, ...]]:
    """The groups of 8 that form while attempts begin and end, looked at every five seconds."""
    found: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for now in range(0, int(max(ended)) + 400, 5):
        names = [str(place) for place, at in enumerate(starts) if at <= now and str(place) not in taken]
        runs = [
            run(name, opened_at=starts[int(name)], last_active_at=ended[int(name)], sealed_at=ended[int(name)])
            for name in names
        ]
        done = [one for one in runs if one.last_active_at <= now]
        open_runs = [one for one in runs if one.last_active_at > now]
        plan = plan_groups(done, size=8, min_size=2, wait_seconds=300.0, now=float(now), under_way=open_runs)
        found += [group.members for group in plan.groups]
        taken |= {name for group in plan.groups for name in group.members}
    return found


def test_a_trajectory_whose_messages_were_lost_is_put_aside_and_the_others_are_grouped(store: Store) -> None:
    torn = [{"role": "system", "content": "Lost."}, {"role": "user", "content": "Where?"}]
    for name in ("torn", "one", "two"):
        start = records.call_start(f"call_{name}", name, torn if name == "torn" else records.QUESTION, task="t")
        if name == "torn":
            start = msgspec.structs.replace(start, nodes=start.nodes[1:])
        store.calls.ship([records.ended(start, {"role": "assistant", "content": name})])
        store.trajectories.seal(name, 2.0)
    settings = TrainerSettings(
        store="s", model="agent", base_model="b", vllm=("http://127.0.0.1:1",), checkpoints="c", num_generations=2,
        judge="tests.harness.trainer.judge_samples:scripted", group_wait_seconds=1.0,
    )  # fmt: skip
    assembly = TrajectoryCollector(store, settings, RoleResolver(store, "agent", Roles()), ScoreHistory(), None)
    for now in (10.0, 11.0):
        assembly.step(now, now)
    assembly.close()
    assert store.trajectories.get("torn").drop_reason == "incomplete"
    assert [set(group.members) for group in store.groups.page()] == [{"one", "two"}]
