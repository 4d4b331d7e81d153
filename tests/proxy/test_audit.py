"""The audit log: operators' reads and changes, with who, what, from where and how it ended; never a secret."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.store.operation_records import AuditEntry
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.servers import eventually

OLD = 1000.0  # Unix seconds
CALL: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def made(store: Store, scope: KeyScope, name: str) -> tuple[dict[str, str], str]:
    """The header and the id of a new key."""
    key = new_key()
    return {"authorization": f"Bearer {key}"}, store.keys.create(name, hash_key(key.encode()), scope).id


def entries(store: Store, count: int) -> list[AuditEntry]:
    """The new entries, oldest first, once there are so many and every outcome is known."""

    def settled() -> list[AuditEntry]:
        found = store.audit.page(since=OLD + 1)
        return found if len(found) >= count and all(one.status is not None for one in found) else []

    found: list[AuditEntry] = eventually(settled)
    return sorted(found, key=lambda one: (one.at, one.id))


@pytest.mark.slow
def test_reads_and_changes_are_recorded_with_key_target_address_and_outcome(
    start: Start, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _ = made(store, KeyScope.AGENT, "crawler")
    ann, ann_id = made(store, KeyScope.OPERATOR, "ann")
    bob, bob_id = made(store, KeyScope.OPERATOR, "bob")
    old: Any = {"id": "audit_000", "at": OLD, "last_at": OLD, "count": 1, "actor": "eve", "status": 200}
    store.audit.record([AuditEntry(**old, method="GET", route="/keys", target={})])
    proxy = start(trusted_proxies=["127.0.0.1"], audit_days=1)
    answer = proxy.http.post("/v1/chat/completions", json=CALL, headers=agent)
    name = answer.headers["x-ratchet-trajectory"]
    proxy.settled()
    at = {"x-forwarded-for": "203.0.113.9"}
    for _ in range(3):
        assert proxy.http.get(f"/api/trajectories/{name}", headers=ann | at).status_code == 200
    chosen = {"alias": "agent", "task": "ann@x"}
    assert proxy.http.get("/api/trajectories", params=chosen, headers=ann).status_code == 200
    assert proxy.http.get("/api/calls/call_none", headers=bob).status_code == 404
    assert proxy.http.post(f"/api/trajectories/{name}/finish", headers=bob | at).status_code == 200
    order = {"reason": "it is a secret"}
    assert proxy.http.post("/api/policies/9/pin", params={"alias": "agent"}, json=order, headers=bob).status_code == 404
    refused = proxy.http.get("/api/calls", headers={**agent, "x-request-id": "mine-7"})
    assert refused.status_code == 403  # not an operator's
    line = "event=operator_refused status=403 client=127.0.0.1 path='/api/calls' request_id='mine-7'"
    assert line in caplog.text
    found = entries(store, 5)
    fields = ("key_id", "actor", "client", "method", "route", "target", "status", "count")
    seen = [tuple(getattr(one, field) for field in fields) for one in found]
    named, near, far = {"trajectory_id": name}, "127.0.0.1", "203.0.113.9"
    assert seen == [
        (ann_id, "ann", far, "GET", "/trajectories/{trajectory_id}", named, 200, 3),
        (ann_id, "ann", near, "GET", "/trajectories", {"alias": "agent"}, 200, 1),
        (bob_id, "bob", near, "GET", "/calls/{call_id}", {"call_id": "call_none"}, 404, 1),
        (bob_id, "bob", far, "POST", "/trajectories/{trajectory_id}/finish", named, 200, 1),
        (bob_id, "bob", near, "POST", "/policies/{version}/pin", {"alias": "agent", "version": "9"}, 404, 1),
    ]
    text = repr(found)
    for secret in ("secret", "ann@x", agent["authorization"][7:], ann["authorization"][7:], bob["authorization"][7:]):
        assert secret not in text
    listed = proxy.http.get("/api/audit", params={"key": bob_id, "changes": True}, headers=ann).json()["data"]
    eventually(lambda: "eve" not in {one.actor for one in store.audit.page()})
    assert [one["route"] for one in listed] == ["/policies/{version}/pin", "/trajectories/{trajectory_id}/finish"]


@pytest.mark.slow
def test_without_keys_and_with_keys_of_the_environment_it_says_so(start: Start, store: Store, tmp_path: Path) -> None:
    start().http.get("/api/agents")
    (first,) = entries(store, 1)
    assert (first.key_id, first.actor) == (None, "without a key")
    hashed = hash_key(b"k-operator")
    proxy = start(journal=tmp_path / "other", operator_hashes=[hashed], key_hashes=[hash_key(b"k-agent")])
    assert proxy.http.get("/api/keys", headers={"x-api-key": "k-operator"}).status_code == 200
    second = entries(store, 2)[-1]
    assert (second.key_id, second.actor, second.route) == (hashed[:16], "RATCHET_OPERATOR_KEYS", "/keys")


@pytest.mark.slow
def test_what_an_agent_gives_feedback_on_is_not_an_operators_change(start: Start, store: Store) -> None:
    agent, _ = made(store, KeyScope.AGENT, "crawler")
    ann, _ = made(store, KeyScope.OPERATOR, "ann")
    proxy = start()
    name = proxy.http.post("/v1/chat/completions", json=CALL, headers=agent).headers["x-ratchet-trajectory"]
    for key in (agent, ann):
        answer = proxy.http.post("/api/feedback", json={"trajectory_id": name, "value": 1}, headers=key)
        assert answer.status_code in (201, 202), answer.text
    (only,) = entries(store, 1)
    assert (only.actor, only.method, only.route, only.target) == ("ann", "POST", "/feedback", {})


def test_a_change_that_cannot_be_recorded_does_not_happen(proxy: Proxy, store: Store, store_file: Path) -> None:
    name = proxy.http.post("/v1/chat/completions", json=CALL).headers["x-ratchet-trajectory"]
    proxy.settled()
    with contextlib.closing(sqlite3.connect(store_file)) as database:
        database.execute("ALTER TABLE audit_entries RENAME TO elsewhere")
        assert proxy.http.post(f"/api/trajectories/{name}/finish").status_code == 503
        assert store.trajectories.get(name).state == "open"
        database.execute("ALTER TABLE elsewhere RENAME TO audit_entries")
    assert proxy.http.post(f"/api/trajectories/{name}/finish").status_code == 200
    assert [one.route for one in entries(store, 1)] == ["/trajectories/{trajectory_id}/finish"]
