"""Activity: what waits for each agent, and what others have made since the last look."""

from __future__ import annotations

import time
from typing import Any

from ratchet.store.coordination import ActivityKind, AgentActivity, has_grown
from ratchet.store.records import Feedback, Verdict
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory

IDLE_SECONDS = 5.0


def look(store: Store) -> dict[str, AgentActivity]:
    return store.activity.read(IDLE_SECONDS)


def test_each_kind_of_waiting_work_is_found_under_its_agent(store: Store) -> None:
    for alias in ("mail", "chat"):
        store.policies.register_base(alias, "base")
    quiet = look(store)
    assert set(quiet) == {"mail", "chat"}
    assert set(quiet["mail"]) == {ActivityKind.VERSION}

    name = "run"
    answered_trajectory(store, name, alias="mail")
    found = look(store)
    assert found["mail"][ActivityKind.IDLE] == 1
    assert has_grown(quiet["mail"], found["mail"])
    assert not has_grown(quiet["chat"], found["chat"])

    store.trajectories.seal_idle_trajectories("mail", time.time(), IDLE_SECONDS)
    sealed = look(store)
    assert ActivityKind.IDLE not in sealed["mail"]
    assert sealed["mail"][ActivityKind.SEALED] == 1
    assert not has_grown(found["mail"], sealed["mail"]), "the trainer sealed it itself"

    group = store.groups.create("task", "mail", [name], time.time())
    ready = look(store)
    assert (ready["mail"][ActivityKind.READY], ActivityKind.SEALED in ready["mail"]) == (1, False)
    store.groups.record_judge_failure(group.id, [], retry_at=time.time() - 1.0)
    assert has_grown(ready["mail"], look(store)["mail"]), "the retry of the judge is due"
    store.groups.record_verdicts(
        group.id, [Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=1.0)]
    )
    assert set(look(store)["mail"]) == {ActivityKind.VERSION, ActivityKind.JUDGED}


def test_what_others_do_makes_an_agents_activity_grow(store: Store) -> None:
    store.policies.register_base("mail", "base")
    name = "run"
    answered_trajectory(store, name, alias="mail")
    before = look(store)["mail"]
    store.trajectories.seal(name, time.time())
    sealed = look(store)["mail"]
    assert has_grown(before, sealed)
    given: dict[str, Any] = {"kind": "trajectory", "target": name, "source": "ann", "given_at": time.time()}
    store.feedback.add([Feedback(id="fb_1", value=1.0, trusted=True, **given)])
    assert has_grown(sealed, look(store)["mail"])
    assert not has_grown(look(store)["mail"], look(store)["mail"])
