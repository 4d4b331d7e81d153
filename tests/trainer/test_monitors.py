"""Monitors: what they are given of a training, and what their failures cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.monitors import check_installed, monitored
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.metadata import ROOT, register
from tests.harness.records import commit_round, judged_group

WAIT = 60.0  # seconds: a busy machine may take its time
NUMBERS = {
    "reward": 0.5, "loss": -0.1, "entropy": 1.25, "kl": 0.01, "tokens_trained": 30, "trajectories": 4,
    "untrained_tokens": {"greedy": 10}, "families": {"math": {"reward": 0.75}},
    "warm_start": {"settings": {"epochs": 3}},
}  # fmt: skip


def committed_round(store: Store, version: int, **changes: Any) -> None:
    """A round and what the proof decided about its version."""
    group = judged_group(store, [f"a{version}", f"b{version}"], [0.0, 1.0], task=f"t{version}")
    commit_round(store, "agent", version, checkpoint="x", groups=[group.id], metrics=NUMBERS | changes)
    store.policies.promote("agent", version, {"proof": {"worst": 0.001}}, reason="its logprobs are the trainer's")


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's monitor, one that cannot be made, and one that cannot be imported."""
    example = "ratchet_plugin_example:JsonLinesMonitor"
    register(
        tmp_path / "site",
        "example",
        f"[ratchet.monitors]\njson_lines = {example}\nodd = json:dumps\nabsent = no_such:M",
    )
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "harness" / "plugin_example"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def curve(folder: Path, name: str) -> list[tuple[str, float]]:
    """The points that have a number of this name, by version."""
    lines = [json.loads(line) for line in (folder / "json_lines" / "points.jsonl").read_text().splitlines()]
    return [(line["model"], line[name]) for line in lines if name in line]


def test_a_monitor_gets_rounds_and_decisions_by_version(store: Store, tmp_path: Path) -> None:
    committed_round(store, 1)
    with monitored(store, "agent", ["json_lines"], tmp_path, WAIT):
        committed_round(store, 2, reward=0.75)
    assert curve(tmp_path, "round/reward") == [("agent@1", 0.5), ("agent@2", 0.75)]
    for name, value in (
        ("round/families/math/reward", 0.75), ("untrained_tokens/greedy", 10), ("round/tokens_per_trajectory", 10),
        ("decision/proof/worst", 0.001),
    ):  # fmt: skip
        assert curve(tmp_path, name) == [("agent@1", value), ("agent@2", value)], name
    assert curve(tmp_path, "round/warm_start/settings/epochs") == []


def test_a_restart_goes_on_and_writes_nothing_twice(store: Store, tmp_path: Path) -> None:
    for version in (1, 2):
        committed_round(store, version)
        with monitored(store, "agent", ["json_lines"], tmp_path, WAIT):
            pass
    assert curve(tmp_path, "round/reward") == [("agent@1", 0.5), ("agent@2", 0.5)]


def test_a_round_under_way_is_drawn_when_it_has_ended(store: Store, tmp_path: Path) -> None:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    held = store.rounds.start("agent", 0)
    with monitored(store, "agent", ["json_lines"], tmp_path, WAIT):
        pass
    store.rounds.commit(held.id, version=1, checkpoint="x", groups=[group.id], metrics=NUMBERS)
    with monitored(store, "agent", ["json_lines"], tmp_path, WAIT):
        pass
    assert curve(tmp_path, "round/loss") == [("agent@1", -0.1)]


def test_a_monitor_that_fails_costs_an_alarm_and_nothing_else(store: Store, tmp_path: Path) -> None:
    committed_round(store, 1)
    with monitored(store, "agent", ["odd", "json_lines"], tmp_path, WAIT):
        pass
    (alarm,) = store.alarms.active()
    assert alarm.name == "monitor:odd:agent"
    assert "takes 1 positional argument" in alarm.reason
    assert curve(tmp_path, "round/reward") == [("agent@1", 0.5)]


def test_the_error_for_an_unknown_or_missing_monitor_has_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown monitor 'grafana' \(installed: absent, json_lines.*name"):
        TrainerSettings(
            store="x", model="m", base_model="b", vllm=("http://x",), checkpoints=tmp_path, judge="a:b",
            report_to=("grafana",),
        )  # fmt: skip
    with pytest.raises(SettingError, match=r"trainer\.report_to: plug-in 'absent'.*install the missing module"):
        check_installed(["absent"])
