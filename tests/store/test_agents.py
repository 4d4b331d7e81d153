"""Several agents in one store: lists and counts of one, what waits for each, and the audit log."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from ratchet.store.coordination import ActivityKind, AgentActivity, has_grown
from ratchet.store.errors import InvalidRecord
from ratchet.store.ids import first_id, moment, new_id
from ratchet.store.operation_records import AuditEntry
from ratchet.store.records import Feedback, Verdict
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory, call_start, ended

REPLY = {"role": "assistant", "content": "Oslo"}


@pytest.fixture
def keys(store: Store) -> tuple[str, str]:
    """Two keys; `mail` was called with both, `support` with the second."""
    made = [store.keys.create(f"key {n}", str(n) * 64, KeyScope.AGENT).id for n in range(2)]
    records = [("mail", made[0], "a"), ("mail", made[0], "a"), ("mail", made[1], "b"), ("support", made[1], "c")]
    for agent, key, run in records:
        store.calls.ship([ended(call_start(new_id("call"), run, alias=agent, key_id=key), REPLY, prompt=(1, 2, 3))])
    store.calls.ship([ended(call_start(first_id("call", time.time() - 9e4), "old", alias="mail"), REPLY)])
    return made[0], made[1]


def test_an_agent_whose_name_differs_by_case_from_one_with_versions_is_refused(store: Store) -> None:
    store.policies.register_base("mail", "base")
    store.policies.register_base("Mail", "base")  # nothing is lost yet
    store.rounds.adopt("mail", version=1, checkpoint="/c/1", origin={}, reason="copied")
    with pytest.raises(InvalidRecord, match=r"MAIL: .* mail, .* case"):
        store.policies.register_base("MAIL", "base")
    assert store.policies.register_base("mail", "other").served_name == "other"


@pytest.mark.usefixtures("keys")
def test_lists_and_counts_are_limited_to_an_agent(store: Store) -> None:
    assert {call.alias for call in store.calls.page(alias="support", tokens=False)} == {"support"}
    assert len(store.calls.page(alias="mail", tokens=False)) == 4
    store.trajectories.seal("c", 99.0)
    assert store.trajectories.counts()["open"] == 3
    assert (store.trajectories.counts("mail")["open"], store.trajectories.counts("support")["sealed"]) == (3, 1)
    assert store.trajectories.counts("nobody")["open"] == 0
    assert store.trajectories.drop_counts("mail") == {}
    texts = [Feedback(id=f"fb_{run}", kind="trajectory", target=run, source="operator", given_at=5.0, value=1.0,
                      trusted=True) for run in ("a", "c", "unknown")]  # fmt: skip
    store.feedback.add(texts)
    assert [one.id for one in store.feedback.page(alias="support")] == ["fb_c"]
    assert len(store.feedback.page()) == 3


def test_ids_of_a_moment_begin_at_its_first_id() -> None:
    before = time.time()
    assert first_id("call", before) <= new_id("call") < first_id("call", before + 60)
    assert moment(first_id("call", 1234.5)) == 1234.5


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


def entry(at: float, **changed: Any) -> AuditEntry:
    values: dict[str, Any] = {
        "method": "GET",
        "route": "/calls/{call_id}",
        "target": {"call_id": "call_1"},
        "actor": "ann",
    }
    values |= {"id": new_id("audit"), "at": at, "last_at": at, "count": 1, "key_id": "key_1", "client": "10.0.0.7"}
    return AuditEntry(**values | changed)


def test_an_entry_is_one_row_that_its_request_brings_up_to_date(store: Store) -> None:
    change = entry(5.0, method="DELETE", status=None)
    store.audit.record([change])
    assert store.audit.page() == [change]
    done = msgspec.structs.replace(change, last_at=6.0, count=2, status=200)
    store.audit.record([done])
    store.audit.record([done])
    assert store.audit.page() == [done]


def test_entries_are_paged_and_filtered(store: Store) -> None:
    read, change = entry(1.0, id="audit_000"), entry(2.0, id="audit_001", method="POST", key_id="key_2")
    store.audit.record([read, change])
    store.audit.record_command("root", "keys revoke", {"key": "key_2"})
    names = [one.route for one in store.audit.page()]
    assert names == ["keys revoke", "/calls/{call_id}", "/calls/{call_id}"]
    assert store.audit.page(1, before="audit_001") == [read]
    assert store.audit.page(key="key_2") == [change]
    assert [one.method for one in store.audit.page(changes=True)] == ["CLI", "POST"]
    assert [one.actor for one in store.audit.page(since=3.0)] == ["root"]


def test_old_entries_are_pruned_by_their_last_request(store: Store) -> None:
    store.audit.record([entry(1.0), entry(1.0, id="audit_001", last_at=10.0)])
    assert store.audit.prune(5.0) == 1
    assert [one.id for one in store.audit.page()] == ["audit_001"]
