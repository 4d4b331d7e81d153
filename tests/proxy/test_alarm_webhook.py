"""Alarms reach the webhook once each, also after an outage; nothing waits for it and its URL is in no log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from ratchet.proxy.coordinator.alarms.alarm_webhook import AlarmWebhook, message_of
from ratchet.proxy.settings import ProxySettings, secret_values
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.operation_records import Alarm
from ratchet.store.store import Store
from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.servers import eventually, until

SECRET = "services/T000/B000/very-secret"


class Webhook:
    """A webhook that answers with a status."""

    def __init__(self) -> None:
        self.status = 200
        self.texts: list[str] = []
        self._server = JsonServer(self._respond)
        self.url = f"{self._server.url}/{SECRET}"

    def _respond(self, request: IncomingRequest) -> tuple[int, Any]:
        if self.status == 200:
            self.texts.append(json.loads(request.body)["text"])
        return self.status, "ok"

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    started = Webhook()
    yield started
    started.close()


async def sender(store: Store, webhook: Webhook) -> AlarmWebhook:
    started = AlarmWebhook(SecretStr(webhook.url), store, ProxyMetrics(), interval_seconds=0.01)
    await started.start()
    return started


async def test_an_alarm_is_sent_once_when_raised_and_once_when_cleared(store: Store, webhook: Webhook) -> None:
    store.alarms.raise_("length_drift:mail", "answers grew from 10 to 30 tokens")
    running = await sender(store, webhook)
    await until(lambda: len(webhook.texts) == 1)
    store.alarms.raise_("length_drift:mail", "answers grew from 10 to 31 tokens")
    store.alarms.raise_("other", "another one")
    await until(lambda: len(webhook.texts) == 2)
    store.alarms.clear("length_drift:mail")
    await until(lambda: len(webhook.texts) == 3)
    await running.stop()
    assert webhook.texts == [
        "Ratchet alarm raised: length_drift:mail\nanswers grew from 10 to 30 tokens",
        "Ratchet alarm raised: other\nanother one",
        "Ratchet alarm cleared: length_drift:mail\nanswers grew from 10 to 31 tokens",
    ]


async def test_an_alarm_is_sent_after_an_outage_of_the_webhook_and_its_url_is_in_no_log(
    store: Store, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ratchet")
    webhook.status = 503
    store.alarms.raise_("proxy", "down")
    running = await sender(store, webhook)
    await until(lambda: "event=alarm_webhook_failed" in caplog.text)
    assert "it answered 503" in caplog.text
    webhook.status = 200
    await until(lambda: len(webhook.texts) == 1)
    await running.stop()
    assert "secret" not in caplog.text


async def test_of_two_proxies_one_sends(store: Store, webhook: Webhook) -> None:
    both = [await sender(store, webhook) for _ in range(2)]
    for number in range(5):
        store.alarms.raise_(f"alarm{number}", "why")
    await until(lambda: len(webhook.texts) == 5)
    for one in both:
        await one.stop()
    assert len(set(webhook.texts)) == 5


def test_an_alarm_that_comes_and_goes_is_quiet_for_a_while(store: Store) -> None:
    def unsent(now: float) -> list[str]:
        return [alarm.name for alarm in store.alarms.unsent(now, quiet_seconds=600.0)]

    store.alarms.raise_("a", "why")
    now = time.time()
    [alarm] = store.alarms.unsent(now, 600.0)
    store.alarms.mark_sent(alarm, now)
    assert unsent(now) == []
    store.alarms.clear("a")
    [alarm] = store.alarms.unsent(now + 1, 600.0)
    store.alarms.mark_sent(alarm, now + 1)
    time.sleep(0.002)
    store.alarms.raise_("a", "again")
    assert unsent(now + 2) == []
    store.alarms.raise_("b", "gone before it was sent")
    store.alarms.clear("b")
    assert "b" not in unsent(now + 2)


def test_a_message_cannot_mention_anybody() -> None:
    alarm = Alarm(name="x", reason="tool '<!channel>' & more", raised_at=1.0, last_raised_at=1.0, count=1)
    assert message_of(alarm) == "Ratchet alarm raised: x\ntool '&lt;!channel&gt;' &amp; more"


@pytest.mark.parametrize("url", ["slack", "ftp://host/secret", "https://", "https://host:port/secret"])
def test_a_webhook_that_is_no_url_is_refused_without_its_text(url: str) -> None:
    values = {"upstreams": ["http://vllm"], "model": "mail", "store": "x.db", "journal": "j"}
    with pytest.raises(ValidationError, match=r"RATCHET_ALARM_WEBHOOK_URL.*: set ") as refused:
        ProxySettings(**values, **secret_values({"RATCHET_ALARM_WEBHOOK_URL": url}, ()))
    assert "secret" not in str(refused.value)


def test_a_proxy_sends_what_a_trainer_raised(vllm_url: str, store: Store, tmp_path: Path, webhook: Webhook) -> None:
    with running(vllm_url, store, tmp_path, alarm_webhook_url=SecretStr(webhook.url)):
        store.alarms.raise_("no_signal:agent", "all scores are equal")
        eventually(lambda: webhook.texts)
    assert webhook.texts[0].endswith("no_signal:agent\nall scores are equal")
