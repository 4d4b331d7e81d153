"""Roles: what other roles sampled never carries loss, and a role may earn a score of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ratchet.store.records import Call, Verdict, pack_logprobs, unpack_ids
from ratchet.store.store import Store
from ratchet.trainer.advantages import AdvantageEstimator
from ratchet.trainer.collect.collector import RoleResolver
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.token_row import UNTRAINED_ROLE, Roles
from tests.harness.records import call_start, ended, judged_group
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work
from tests.trainer.test_rows import call, choice

if TYPE_CHECKING:
    from tests.harness.trainer.stepped_controller import SteppedController

PLAN = [{"role": "system", "content": "You plan the work."}, {"role": "user", "content": "Build it."}]
WORK: list[dict[str, Any]] = [{"role": "system", "content": [{"type": "text", "text": "You do one step."}]}, *PLAN[1:]]
PROMPTS = {"planner": r"^You plan\b", "worker": r"\bone step\b"}


def played(roles: Sequence[str | None], exact: Sequence[bool]) -> list[Call]:
    """A trajectory of calls, each with its role; those that are exact continue the one before."""
    calls: list[Call] = []
    for number, role in enumerate(roles):
        goes_on = number > 0 and exact[number]
        ids = (100 + 10 * number, 101 + 10 * number)
        answer = choice(ids, logprobs=(-0.25 * number, -0.5))
        parent = {"parent_call": str(number - 1), "context": "exact"} if goes_on else {}
        calls.append(call(str(number), (1, 2), answer, role=role, started_at=float(number), **parent))
    return calls


_ROLES = st.sampled_from([None, "planner", "worker", "critic"])


@given(st.lists(st.tuples(_ROLES, st.booleans()), min_size=1, max_size=8), st.sets(_ROLES.filter(bool), max_size=3))
def test_the_trained_tokens_are_those_that_the_chosen_roles_sampled_each_once(
    course: list[tuple[str | None, bool]], chosen: set[str]
) -> None:
    calls = played([role for role, _ in course], [exact for _, exact in course])
    roles = Roles(train=tuple(chosen))
    built = build_rows("t", calls, 1.0, roles)
    trained = [token for row in built.rows for token, mark in zip(row.ids, row.mask, strict=True) if mark]
    of_them = [one for one in calls if not chosen or one.role in chosen]
    assert sorted(trained) == sorted(token for one in of_them for token in unpack_ids(one.choices[0].token_ids))
    assert sum(built.untrained.values()) == 2 * (len(calls) - len(of_them))
    assert set(built.untrained) <= {UNTRAINED_ROLE}
    for row in built.rows:  # what is context has no logprob of another role either
        assert all(mark or logprob == 0.0 for mark, logprob in zip(row.mask, row.logprobs, strict=True))


def test_roles_that_earned_apart_are_rows_of_their_own_also_in_one_exact_chain() -> None:
    calls = played(["planner", "worker", "planner"], [False, True, True])
    rows = build_rows("t", calls, 0.0, Roles(("planner", "worker")), {"planner": 0.5, "worker": -1.0}).rows
    earned = {token: row.advantage for row in rows for token, mark in zip(row.ids, row.mask, strict=True) if mark}
    assert earned == {100: 0.5, 101: 0.5, 110: -1.0, 111: -1.0, 120: 0.5, 121: 0.5}
    assert [row.mask.count(1) for row in rows] == [2, 4]


def test_the_header_says_the_role_and_else_the_system_prompt_does(store: Store) -> None:
    shipped = [
        call_start("c1", "t1", PLAN, at=1.0),
        call_start("c2", "t1", WORK, at=2.0),
        call_start("c3", "t1", PLAN, at=3.0, role="critic"),
        call_start("c4", "t1", PLAN[1:], at=4.0),
    ]
    store.calls.ship([ended(start, {"role": "assistant", "content": start.call_id}) for start in shipped])
    resolver = RoleResolver(store, "agent", Roles(("planner",), PROMPTS))
    calls = resolver.with_roles(store.trajectories.read("t1").calls)
    assert [one.role for one in calls] == ["planner", "worker", "critic", None]


def test_a_longer_conversation_has_the_system_prompt_that_it_began_with(store: Store) -> None:
    further = [*PLAN, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and then?"}]
    start = call_start("c1", "t1", further)
    store.calls.ship([ended(start, {"role": "assistant", "content": "b"}, messages=further)])
    assert store.trajectories.system_prompt(start.prompt_node) == "You plan the work."


def verdicts(scores: Sequence[float], **components: Sequence[float]) -> list[Verdict]:
    return [
        Verdict(
            trajectory_id=str(number), group_id="g", judge="j", judge_version="1", score=score,
            components={name: values[number] for name, values in components.items() if number < len(values)},
        )
        for number, score in enumerate(scores)
    ]  # fmt: skip


def test_a_component_of_a_roles_name_is_that_roles_score_where_every_member_has_it(store: Store) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    members = [store.trajectories.get(name) for name in group.members]
    estimator = AdvantageEstimator("dr_grpo", roles=("planner", "worker"))
    member_verdicts = verdicts([1.0, 0.0], planner=[0.0, 1.0], worker=[0.5])
    assert estimator.advantages(members, member_verdicts, "planner") == (-0.5, 0.5)
    assert estimator.advantages(members, member_verdicts, "worker") == (0.5, -0.5)


def test_a_group_teaches_where_the_roles_that_train_differ_and_only_there(store: Store) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    members = [store.trajectories.get(name) for name in group.members]
    same = verdicts([1.0, 1.0], planner=[0.0, 1.0])
    assert AdvantageEstimator(roles=("planner",)).estimate(group, members, same).has_signal
    assert not AdvantageEstimator(roles=("worker",)).estimate(group, members, same).has_signal
    assert (
        not AdvantageEstimator(roles=("planner",))
        .estimate(group, members, verdicts([0.0, 1.0], planner=[1.0, 1.0]))
        .has_signal
    )


def two_roles(store: Store, task: str, scores: Sequence[float]) -> None:
    """Attempts at a task in which a planner speaks, a worker after it."""
    for number, score in enumerate(scores):
        name = f"{task}-{number}"
        judge_samples.by_answer[name] = score
        for at, (role, words) in enumerate((("worker", "done"), ("planner", name)), 1):
            start = call_start(f"{name}-{role}", name, task=task, role=role, at=float(at))
            store.calls.ship([ended(start, {"role": "assistant", "content": words}, ids=(10 * at + number, 2))])


def test_a_round_trains_the_chosen_role_and_counts_the_tokens_of_the_others(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    two_roles(store, "a", [0.0, 1.0])
    two_roles(store, "b", [0.0, 1.0])
    make_controller(roles=["planner"]).step(1000.0)
    (held,) = store.rounds.page("agent")
    assert (held.metrics["tokens_trained"], held.metrics["untrained_tokens"]) == (8, {UNTRAINED_ROLE: 8})
    assert store.policies.live()["agent"].version == 1


def test_trajectories_without_a_role_that_trains_are_put_aside_and_grouped_with_nobody(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.0, 1.0], role="worker")
    agents_work(store, "b", [0.0, 1.0], role="planner")
    make_controller(roles=["planner"], groups_per_round=1).step(1000.0)
    assert store.trajectories.drop_counts() == {"other_role": 2}
    assert store.policies.live()["agent"].version == 1
    assert store.alarms.active() == []


@pytest.mark.slow
def test_traffic_without_the_role_is_an_alarm_that_names_the_remedy_until_it_speaks(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    roles: dict[str, Any] = {"roles": ["planner"], "role_patterns": {"planner": "You plan"}}
    agents_work(store, "a", [0.0] * 20)
    make_controller(**roles).step(999.0)
    assert store.alarms.active() == []
    agents_work(store, "c", [0.0] * 12)
    controller = make_controller(**roles)  # goes on counting
    controller.step(1000.0)
    (alarm,) = store.alarms.active()
    assert alarm.name == "no_role:agent"
    assert "trainer.role_patterns" in alarm.reason
    agents_work(store, "b", [0.0, 1.0], messages=PLAN)
    controller.step(1001.0)
    assert store.alarms.active() == []


def test_a_pattern_that_is_none_is_refused_with_its_role(make_controller: Callable[..., SteppedController]) -> None:
    with pytest.raises(ValidationError, match="role planner "):
        make_controller(role_patterns={"planner": "("})


def test_logprobs_of_context_are_never_those_of_another_role() -> None:
    calls = played(["worker", "planner"], [False, True])
    (row,) = build_rows("t", calls, 1.0, Roles(("planner",))).rows
    assert (row.ids[2:4], row.mask[2:4], row.logprobs[2:4]) == ((100, 101), (0, 0), (0.0, 0.0))
    assert pack_logprobs(row.logprobs[-2:]) == calls[1].choices[0].logprobs
