"""What the trainer tells Prometheus, over HTTP as Prometheus asks for it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ratchet.store.states import ToolResult
from ratchet.store.store import Store
from ratchet.trainer.controller.sentinel.sentinel import Sentinel
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.metrics import MetricsRegistry, TrainerMetrics
from ratchet.trainer.settings.trainer_sections import SentinelSettings
from ratchet.trainer.statistics import MeanDifference
from tests import house
from tests.harness.records import answered_trajectory, commit_round, judged_group
from tests.harness.trainer.tool_records import tool_called


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
