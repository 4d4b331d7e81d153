"""What W&B keeps of a training in its own format, and what its failure costs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from ratchet.store.store import Store
from ratchet.trainer.observability.monitors import monitored
from tests.harness.cli.project import wait_for
from tests.trainer.test_metrics import WAIT, committed_round


def read_wandb(file: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of an offline run: LevelDB's log format after seven bytes, one protobuf record each."""
    content, place = file.read_bytes(), 7
    whole = b""
    while place + 7 <= len(content):
        if place % 32768 > 32768 - 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if place + 7 + length > len(content):  # it is being written
            return
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or the last part of one
            record, whole = Record.FromString(whole), b""
            if record.HasField("history"):
                yield {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}


def test_wandb_keeps_an_offline_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    committed_round(store, 1)
    with monitored(store, "agent", ["wandb"], tmp_path, WAIT):
        committed_round(store, 2, reward=0.75)
    (run,) = (tmp_path / "wandb" / "wandb").glob("offline-run-*/run-*.wandb")
    # W&B's own process writes the file, and a moment after the run has ended.
    wait_for("every row is written", lambda: len(list(read_wandb(run))) == 4, WAIT)
    rows = list(read_wandb(run))
    assert [(row["version"], row["round/reward"]) for row in rows if "round/reward" in row] == [(1, 0.5), (2, 0.75)]
    assert rows[-1]["decision/note"] == "agent@2: promote by proof: its logprobs are the trainer's"


def test_a_mode_that_is_none_costs_an_alarm_and_nothing_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    committed_round(store, 1)
    with monitored(store, "agent", ["wandb"], tmp_path, WAIT):
        pass
    (alarm,) = store.alarms.active()
    assert alarm.name == "monitor:wandb:agent"
    assert "no such mode" in alarm.reason
