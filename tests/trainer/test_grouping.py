"""Who is compared with whom."""

from __future__ import annotations

from typing import Any

from store.records import Trajectory
from store.states import TrajectoryState
from trainer.grouping import GroupingPlan, plan_groups


def run(name: str, task: str | None = "t", sealed_at: float = 0.0, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "id": name, "alias": "a", "version": 0, "state": TrajectoryState.SEALED, "task": task, "root_node": "r",
        "tools_hash": "", "key_id": None, "opened_at": 0.0, "last_active_at": 0.0, "sealed_at": sealed_at,
    }  # fmt: skip
    return Trajectory(**(values | changes))


def plan(waiting: list[Trajectory], now: float = 1.0) -> GroupingPlan:
    return plan_groups(waiting, size=3, least=2, wait_seconds=60.0, now=now)


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
    assert [run.id for run in found.alone] == ["c"]
    found = found.settled(singles=False)
    assert [group.members for group in found.groups] == [("a", "b")]
    assert found.drops == (("c", "single"),)


def test_a_run_that_a_machine_cut_off_is_nobodys_failure() -> None:
    waiting = [run(str(number)) for number in range(4)]
    found = plan_groups(waiting, size=3, least=2, wait_seconds=60.0, now=1.0, cut_off={"1"})
    assert [group.members for group in found.groups] == [("0", "2", "3")]
    assert found.drops == (("1", "cut_off"),)


def test_an_evaluation_is_never_training_data() -> None:
    found = plan([run(str(number), purpose="eval") for number in range(3)])
    assert found.groups == ()
    assert found.drops == (("0", "eval"), ("1", "eval"), ("2", "eval"))


def test_singles_become_groups_of_one_where_they_are_wanted() -> None:
    waiting = [run("a"), run("b", task="other"), run("new", task="third", sealed_at=50.0)]
    found = plan(waiting, now=61.0).settled(singles=True)
    assert [group.members for group in found.groups] == [("a",), ("b",)]
    assert found.drops == ()


def test_who_waits_for_shadows_is_neither_dropped_nor_taken_as_a_single() -> None:
    alone = plan([run("a"), run("b", task="other")], now=61.0)
    assert alone.settled(singles=False, waiting={"a"}).drops == (("b", "single"),)
    assert [group.members for group in alone.settled(singles=True, waiting={"a"}).groups] == [("b",)]
