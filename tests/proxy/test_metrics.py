"""The proxy's metrics, and that documentation and dashboard name exactly these."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ratchet.proxy.telemetry.call_telemetry import CallCounters, CallTiming
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.trainer.observability.metrics import TrainerMetrics
from tests.harness.proxy.running_proxy import Proxy, Start, chat_body
from tests.harness.proxy.servers import ROOT, eventually
from tests.harness.records import call_start, ended

CALL = "/v1/chat/completions"


def families(proxy: Proxy) -> list[Metric]:
    """Return the metric families that the proxy exports."""
    return list(text_string_to_metric_families(proxy.http.get("/metrics").text))


def value(proxy: Proxy, name: str, **labels: str) -> float:
    """Return the sum of all samples of a name with these labels."""
    return sum(
        sample.value
        for family in families(proxy)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_calls_are_counted_by_alias_dialect_and_state(proxy: Proxy) -> None:
    proxy.http.post(CALL, json=chat_body("hi"))
    proxy.http.post(CALL, json=chat_body("#noids"))
    proxy.http.post(CALL, json=chat_body("#status=500"))
    proxy.http.post("/v1/messages", json=chat_body("hi", max_tokens=9))
    assert value(proxy, "ratchet_calls_total", alias="agent", dialect="chat", state="answered") == 2
    assert value(proxy, "ratchet_calls_total", dialect="chat", state="failed") == 1
    assert value(proxy, "ratchet_calls_total", dialect="messages", state="answered") == 1
    assert value(proxy, "ratchet_calls_total", purpose="live") == 4
    assert value(proxy, "ratchet_untrainable_calls_total", reason="no_prompt_token_ids") == 1
    assert value(proxy, "ratchet_links_total", linked_by="root") == 4
    assert value(proxy, "ratchet_call_duration_seconds_count", alias="agent") == 4
    assert value(proxy, "ratchet_overhead_seconds_count") == 4
    assert value(proxy, "ratchet_calls_in_flight") == 0


def test_a_stream_is_measured_from_its_first_token_to_its_last(proxy: Proxy) -> None:
    with proxy.http.stream("POST", CALL, json=chat_body("#tokens=10 #delay=0.02", stream=True)) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    mean = value(proxy, "ratchet_inter_token_latency_seconds_sum")
    assert value(proxy, "ratchet_inter_token_latency_seconds_count") == 1
    assert 0.015 < mean < 0.2, "11 tokens, 20 ms apart"
    assert (
        0 < value(proxy, "ratchet_time_to_first_token_seconds_sum") < value(proxy, "ratchet_call_duration_seconds_sum")
    )
    assert value(proxy, "ratchet_tokens_total", alias="agent", kind="completion") == 11


def test_an_answer_in_one_piece_has_no_time_between_tokens(proxy: Proxy) -> None:
    proxy.http.post(CALL, json=chat_body("#tokens=10"))
    assert value(proxy, "ratchet_call_duration_seconds_count") == 1
    assert (
        value(proxy, "ratchet_inter_token_latency_seconds_count")
        == value(proxy, "ratchet_time_to_first_token_seconds_count")
        == 0
    )


@pytest.mark.parametrize(
    ("body", "path", "error"),
    [
        (chat_body("#status=503"), CALL, "status_5xx"),
        (chat_body("#status=400"), CALL, "status_4xx"),
        (chat_body("#tokens=9 #cut=3", stream=True), CALL, "upstream_disconnected"),
        (chat_body("#tokens=9 #fault=3", stream=True), CALL, "stream_error"),
        ({"model": "agent"}, CALL, "bad_request"),
        ({**chat_body("hi"), "model": "other"}, CALL, "not_found"),
        ({}, "/nowhere", "not_found"),
        (chat_body("x" * 5000), CALL, "body_too_large"),
    ],
)
def test_failures_are_counted_by_class(start: Start, body: dict[str, Any], path: str, error: str) -> None:
    proxy = start(max_body_bytes=4096)
    proxy.http.post(path, json=body)
    assert value(proxy, "ratchet_errors_total") == value(proxy, "ratchet_errors_total", **{"class": error}) == 1


def test_a_client_that_leaves_is_an_error_of_its_own_class(proxy: Proxy) -> None:
    with proxy.http.stream("POST", CALL, json=chat_body("#tokens=500 #delay=0.02", stream=True)) as answer:
        next(answer.iter_bytes())
    eventually(lambda: value(proxy, "ratchet_errors_total", **{"class": "client_disconnected"}) == 1)
    assert value(proxy, "ratchet_calls_total", state="aborted") == 1


@pytest.mark.slow
def test_lag_is_the_age_of_the_oldest_unshipped_record(start: Start, tmp_path: Path) -> None:
    proxy = start(max_lag_seconds=1.0)
    proxy.http.post(CALL, json=chat_body("hi"))
    proxy.settled()
    assert value(proxy, "ratchet_journal_lag_seconds") == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")  # blocks writes to the store
        proxy.http.post(CALL, json=chat_body("hi"))
        eventually(lambda: value(proxy, "ratchet_journal_lag_seconds") > 1.2)
        backlog = proxy.http.get("/health/backlog")
        assert (backlog.status_code, backlog.json()["status"]) == (503, "behind")
        assert 1.2 < backlog.json()["lag_seconds"] < 4
        assert backlog.json()["unshipped_records"] >= 1
        writer.execute("ROLLBACK")
    eventually(lambda: value(proxy, "ratchet_journal_lag_seconds") == 0)
    assert proxy.http.get("/health/backlog").status_code == 200


def test_the_live_policy_and_the_build_are_exported(proxy: Proxy) -> None:
    assert value(proxy, "ratchet_policy_info", alias="agent", version="0", state="live") == 1
    assert value(proxy, "ratchet_build_info") == 1


def test_every_metric_is_documented_and_only_those(proxy: Proxy) -> None:
    page, _, _ = (ROOT / "docs" / "metrics.md").read_text().partition("## The trainer")
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families(proxy)}
    assert names == set(re.findall(r"^\| `(ratchet_\w+)`", page, re.MULTILINE))
    assert _named_in(page) <= names


def test_no_created_samples_are_exported(proxy: Proxy) -> None:
    proxy.http.get("/v1/nothing")
    assert "ratchet_errors_total" in (page := proxy.http.get("/metrics").text)
    assert "_created" not in page


def test_the_dashboard_uses_only_existing_metrics(proxy: Proxy) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 20
    shown = [*families(proxy), *TrainerMetrics("agent", proxy.store).registry.collect()]
    known = {family.name + ("_total" if family.type == "counter" else "") for family in shown}
    for expression in expressions:
        assert _named_in(expression) <= known, expression
        assert expression.count("(") == expression.count(")")
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places), "no panel lies on another"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_the_dashboard_uses_only_documented_labels() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(ratchet_\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    labels = {name: set(re.findall(r"`(\w+)`", units.partition(";")[2])) for name, units in rows}
    for panel in json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            known = set.union(*(labels[name] for name in _named_in(target["expr"])))
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) | _labels_in(target["expr"])
            assert used <= known | {"le"}, f"{panel['title']}: {target}"


def test_the_dashboard_shows_how_releases_go() -> None:
    shown = (ROOT / "deploy" / "grafana" / "dashboard.json").read_text()
    for name in ("version_share_ratio", "version_trajectories_total", "release_harm", "release_difference",
                 "release_counted", "invalid_tool_call_ratio", "question_ratio", "judge_tokens_total"):  # fmt: skip
        assert f"ratchet_{name}" in shown


def _labels_in(expression: str) -> set[str]:
    """Return the labels that an expression groups by or selects."""
    grouped = re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)
    return {label.strip() for labels in grouped for label in labels.split(",")} | set(selected)


def _named_in(text: str) -> set[str]:
    """Return the metric families that a text names."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bratchet_[a-z_]+", text)}


def test_keys_are_labels_up_to_a_bound() -> None:
    metrics = ProxyMetrics()
    counters = CallCounters(metrics)
    for number in range(150):
        start = call_start(f"call_{number}", "job", key_id=f"key_{number}")
        counters.count(ended(start, {"role": "assistant", "content": "hi"}), CallTiming(1.0, None, None, None), None)
    counters.count(
        ended(call_start("c", "job", key_id="open:1"), {"role": "assistant"}), CallTiming(1.0, None, None, None), None
    )
    calls = {
        sample.labels["key"]: sample.value
        for family in metrics.key_calls.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert (len(calls), calls["other"], calls["key_7"], calls["none"]) == (102, 50, 1, 1)
