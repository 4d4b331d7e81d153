"""`ratchet audit`, and the changes by command that it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.cli import run
from ratchet.options import current_user
from ratchet.store.operation_records import AuditEntry
from ratchet.store.store import open_store
from tests.harness.records import answered_trajectory


def test_keys_and_deletions_by_command_and_requests_are_listed(
    store_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(store_file))
    answered_trajectory(store, "job")
    seen: Any = {
        "at": 1e9,
        "last_at": 1e9 + 5,
        "count": 3,
        "actor": "ann\x1b[31m",
        "key_id": "key_1",
        "client": "10.0.0.7",
    }
    store.audit.record([AuditEntry(**seen, id="audit_00", method="GET", route="/calls", target={"alias": "mail"})])
    at = ("--store", str(store_file))
    assert run(["keys", "create", "--name", "crawler", *at]) == 0
    key = capsys.readouterr().out.strip()
    (made,) = store.keys.all()
    assert run(["keys", "update", made.id, "--requests-per-minute", "5", *at]) == 0
    assert run(["keys", "revoke", made.id, *at]) == 0
    assert run(["store", "delete", "job", "--yes", *at]) == 0
    store.close()
    capsys.readouterr()
    assert run(["audit", *at]) == 0
    shown = capsys.readouterr().out
    last, revoked, updated, created, read = shown.splitlines()
    assert last.endswith(f"{current_user()}  CLI  store delete  reason=delete: 1 by id trajectories=1  done")
    assert revoked.endswith(f"CLI  keys revoke  key={made.id} name=crawler  done")
    assert updated.endswith(f"CLI  keys update  key={made.id} name=crawler changed=requests_per_minute  done")
    assert "CLI  keys create" in created
    assert read == (
        "2001-09-09 01:46:40  ann\N{REPLACEMENT CHARACTER}[31m (key_1)  10.0.0.7  GET  /calls  alias=mail  "
        "outcome unknown  3 times"
    )
    assert key not in shown
    assert run(["audit", "--changes", "--json", *at]) == 0
    assert [one["route"] for one in json.loads(capsys.readouterr().out)] == [
        "store delete", "keys revoke", "keys update", "keys create"
    ]  # fmt: skip
