"""What the trainer tells Prometheus and monitors, and what their failures cost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ratchet.store.states import ToolResult
from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.metrics import MetricsRegistry, TrainerMetrics
from ratchet.trainer.observability.monitors import check_installed, monitored
from ratchet.trainer.sentinel.sentinel import Sentinel
from ratchet.trainer.settings.trainer_settings import SentinelSettings, TrainerSettings
from ratchet.trainer.statistics import MeanDifference
from tests import house
from tests.harness.packages import ROOT, register
from tests.harness.records import answered_trajectory, commit_round, judged_group, tool_called


def samples(metrics: TrainerMetrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values."""
    text = httpx.get(f"http://127.0.0.1:{metrics.process.serve('127.0.0.1', 0)}/metrics", trust_env=False).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_findings_rounds_drops_and_alarms_are_metrics(store: Store) -> None:
    judged_group(store, ["a", "b"], [0.0, 1.0])
    flat = judged_group(store, ["c", "d"], [0.0, 0.0])
    store.groups.drop(flat.id, "no_variance")
    held = store.rounds.start("agent", 0)
    numbers = {"reward": 0.5, "loss": -0.1, "untrained_tokens": {"greedy": 7}, "tokens_trained": 3}
    group = next(one for one in store.groups.awaiting_round("agent"))
    store.rounds.commit(held.id, version=1, checkpoint="x", groups=[group.id], metrics=numbers)
    tool_called(store, "a", ToolResult.TIMEOUT)
    metrics = TrainerMetrics("agent", store)
    watching = Sentinel(SentinelSettings(interval_seconds=1.0), store, "agent", metrics)
    watching.check(1.0)
    watching.check(2.0)
    found = samples(metrics)
    assert found["ratchet_training_paused", "agent"] == 1
    assert found["ratchet_tool_failure_ratio", "agent", "search"] == 1
    assert found["ratchet_alarm_active", "training_paused:agent"] == 1
    assert found["ratchet_trajectories_dropped_total", "no_variance"] == 2
    assert found["ratchet_groups_dropped_total", "agent", "no_variance"] == 1
    assert found["ratchet_rounds_total", "agent", "committed"] == 1
    assert found["ratchet_untrained_tokens_total", "agent", "greedy"] == 7
    assert found["ratchet_round_reward", "agent"] == 0.5
    assert found["ratchet_untrained_token_ratio", "agent"] == 0.7


def test_the_state_and_decisions_of_a_release_are_metrics(store: Store) -> None:
    for version in (1, 2):
        commit_round(store, "agent", version, checkpoint="x")
    store.policies.promote("agent", 1, {})
    store.policies.start_ramp("agent", 2, 0.5)
    store.policies.require_approval("agent", 2, {}, by="release", reason="too good")
    metrics = TrainerMetrics("agent", store)
    metrics.release(2.5, 20, MeanDifference(0.5, 0.25, 0.75, 30))
    metrics.evaluating(True)
    found = samples(metrics)
    assert (found["ratchet_live_version", "agent"], found["ratchet_release_pending_approval", "agent"]) == (1, 1)
    assert found["ratchet_policy_decisions_total", "hold", "agent"] == 1
    assert found["ratchet_policy_decisions_total", "ramp", "agent"] == 1
    assert (found["ratchet_release_harm", "agent"], found["ratchet_release_counted", "agent"]) == (2.5, 20)
    assert found["ratchet_release_difference", "agent", "low"] == 0.25
    assert found["ratchet_evaluation_running", "agent"] == 1
    metrics.release(1.0, 0, None)
    assert not [name for name, *_ in samples(metrics) if name == "ratchet_release_difference"]


def test_what_is_no_longer_found_is_no_longer_shown(store: Store) -> None:
    answered_trajectory(store, "a")
    tool_called(store, "a", ToolResult.OK)
    metrics = TrainerMetrics("agent", store)
    Sentinel(SentinelSettings(), store, "agent", metrics).check(1.0)
    metrics.findings((), paused=False)
    assert not [name for name, *_ in samples(metrics) if name == "ratchet_tool_failure_ratio"]


def test_a_store_that_is_away_leaves_the_rest(store: Store, tmp_path: Path) -> None:
    metrics = TrainerMetrics("agent", store)
    store.close()
    (tmp_path / "store.db").rename(tmp_path / "away.db")
    assert samples(metrics) == {("ratchet_training_paused", "agent"): 0}


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    port = MetricsRegistry().serve("127.0.0.1", 0)
    with pytest.raises(SettingError, match=f"trainer.metrics_port {port}"):
        MetricsRegistry().serve("127.0.0.1", port)


def test_every_metric_of_the_trainer_is_documented(store: Store) -> None:
    page = (
        (house.ROOT / "docs" / "metrics.md").read_text().partition("## The trainer")[2].partition("## The learner")[0]
    )
    families = TrainerMetrics("agent", store).registry.collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert names == set(re.findall(r"^\| `(ratchet_\w+)`", page, re.MULTILINE))


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
