"""The audit log in the store: entries once, brought up to date, paged, filtered and pruned."""

from __future__ import annotations

from typing import Any

import msgspec

from ratchet.store.ids import new_id
from ratchet.store.operation_records import AuditEntry
from ratchet.store.store import Store


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
