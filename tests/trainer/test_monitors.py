"""Monitors: what TensorBoard and W&B read of a training, in their own formats, and what their failures cost."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.monitors.monitor_thread import check_installed, monitored
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.cli.project import wait_for
from tests.harness.records import judged_group

WAIT = 60.0  # seconds: a busy machine may take its time
NUMBERS = {
    "reward": 0.5, "loss": -0.1, "entropy": 1.25, "kl": 0.01, "tokens_trained": 30, "trajectories": 4,
    "untrained_tokens": {"greedy": 10}, "families": {"math": {"reward": 0.75}},
    "warm_start": {"settings": {"epochs": 3}},
}  # fmt: skip


def committed_round(store: Store, version: int, **changes: Any) -> None:
    """A round and what the proof decided about its version."""
    group = judged_group(store, [f"a{version}", f"b{version}"], [0.0, 1.0], task=f"t{version}")
    held = store.rounds.start("agent", version - 1)
    store.rounds.commit(held.id, version=version, checkpoint="x", groups=[group.id], metrics=NUMBERS | changes)
    store.policies.promote("agent", version, {"proof": {"worst": 0.001}}, reason="its logprobs are the trainer's")


def read_tensorboard(folder: Path) -> EventAccumulator:
    """What TensorBoard itself reads of a folder."""
    return EventAccumulator(str(folder)).Reload()


def curve(read: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, round(point.value, 6)) for point in read.Scalars(name)]


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


def test_tensorboard_draws_rounds_and_decisions_by_version(store: Store, tmp_path: Path) -> None:
    committed_round(store, 1)
    with monitored(store, "agent", ["tensorboard"], tmp_path / "monitors", WAIT):
        committed_round(store, 2, reward=0.75)
    read = read_tensorboard(tmp_path / "monitors" / "tensorboard")
    assert curve(read, "round/reward") == [(1, 0.5), (2, 0.75)]
    assert curve(read, "round/kl") == [(1, 0.01), (2, 0.01)]
    assert curve(read, "round/families/math/reward") == [(1, 0.75), (2, 0.75)]
    assert curve(read, "untrained_tokens/greedy") == [(1, 10), (2, 10)]
    assert curve(read, "round/tokens_per_trajectory") == [(1, 10), (2, 10)]
    assert curve(read, "decision/proof/worst") == [(1, 0.001), (2, 0.001)]
    assert not [name for name in read.Tags()["scalars"] if "settings" in name]
    notes = [one.tensor_proto.string_val[0] for one in read.Tensors("decision")]
    assert notes[-1] == b"agent@2: promote by proof: its logprobs are the trainer's"


def test_a_restart_goes_on_and_writes_nothing_twice(store: Store, tmp_path: Path) -> None:
    for version in (1, 2):
        committed_round(store, version)
        with monitored(store, "agent", ["tensorboard"], tmp_path, WAIT):
            pass
    assert curve(read_tensorboard(tmp_path / "tensorboard"), "round/reward") == [(1, 0.5), (2, 0.5)]


def test_a_round_under_way_is_drawn_when_it_has_ended(store: Store, tmp_path: Path) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    held = store.rounds.start("agent", 0)
    with monitored(store, "agent", ["tensorboard"], tmp_path, WAIT):
        pass
    store.rounds.commit(held.id, version=1, checkpoint="x", groups=[group.id], metrics=NUMBERS)
    with monitored(store, "agent", ["tensorboard"], tmp_path, WAIT):
        pass
    assert curve(read_tensorboard(tmp_path / "tensorboard"), "round/loss") == [(1, -0.1)]


@pytest.mark.slow
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


def test_a_monitor_that_fails_costs_an_alarm_and_nothing_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    committed_round(store, 1)
    with monitored(store, "agent", ["wandb", "tensorboard"], tmp_path, WAIT):
        pass
    (alarm,) = store.alarms.active()
    assert alarm.name == "monitor:wandb:agent"
    assert "no such mode" in alarm.reason
    assert curve(read_tensorboard(tmp_path / "tensorboard"), "round/reward") == [(1, 0.5)]


def test_the_error_for_an_unknown_or_missing_monitor_has_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="unknown monitor 'grafana': installed are tensorboard, wandb"):
        TrainerSettings(
            store="x", model="m", base_model="b", vllm=("http://x",), checkpoints=tmp_path, judge="a:b",
            report_to=("grafana",),
        )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "ratchet.trainer.observability.monitors.weights_and_biases", raising=False)
    with pytest.raises(SettingError, match=r"trainer\.report_to: plug-in 'wandb'.*pip install '\.\[wandb\]'"):
        check_installed(["wandb"])
