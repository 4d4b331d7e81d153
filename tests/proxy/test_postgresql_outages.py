"""A proxy whose PostgreSQL hangs: calls are served, and metrics, readiness and log say so."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from ratchet.store.errors import StoreUnavailable
from ratchet.store.store import open_store
from ratchet.store.verify import verify
from tests.harness.postgres import postgres_server
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.proxy.test_durability import BODY, ready

pytestmark = [
    pytest.mark.slow,
    pytest.mark.postgres,
    pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR"),
]


def test_a_postgresql_that_hangs_is_reported_as_down_and_fails_no_call(vllm_url: str, tmp_path: Path) -> None:
    with postgres_server() as server:
        process = ProxyProcess(tmp_path, upstreams=[vllm_url], store=server.url)
        eventually(lambda: ready(process.url))
        with httpx.Client(base_url=process.url, timeout=60) as client:
            eventually(lambda: "ratchet_store_up 1.0" in client.get("/metrics").text)
            server.hang()
            try:
                assert client.post("/v1/chat/completions", json=BODY).status_code == 200
                eventually(lambda: "ratchet_store_up 0.0" in client.get("/metrics").text)
                assert client.get("/health/ready").json()["store_up"] is False
                time.sleep(6.0)
                readiness = client.get("/health/ready")
                assert readiness.status_code == 200, "a load balancer goes on sending calls"
                assert client.post("/v1/chat/completions", json=BODY).status_code == 200
                began = time.monotonic()
                with pytest.raises(StoreUnavailable, match="is PostgreSQL running there"):
                    open_store(server.url)
                assert time.monotonic() - began < 20
            finally:
                server.resume()
            eventually(lambda: "ratchet_store_up 1.0" in client.get("/metrics").text)
            assert client.get("/health/ready").json()["store_up"] is True
        log = (tmp_path / "proxy.log").read_text()
        assert log.count("event=heartbeat_failed") == 1
        assert "has not answered for 5 s" in log
        server.hang()
        try:
            assert process.stop() == 0
        finally:
            server.resume()


def test_after_a_failover_that_lost_commits_no_later_record_lacks_messages(vllm_url: str, tmp_path: Path) -> None:
    def is_up(state: float) -> bool:
        return f"ratchet_store_up {state}" in httpx.get(process.url + "/metrics").text

    def call(*more: dict[str, str]) -> dict[str, str]:
        body = BODY | {"messages": [*conversation, *more]}
        answer = httpx.post(process.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
        return {"role": "assistant", "content": answer["content"]}

    conversation = [{"role": "system", "content": "a prompt of every call"}, {"role": "user", "content": "hi"}]
    log = tmp_path / "proxy.log"
    with postgres_server() as server:
        process = ProxyProcess(tmp_path, upstreams=[vllm_url], store=server.url)
        eventually(lambda: ready(process.url))
        eventually(lambda: is_up(1.0))
        server.kill()
        server.save_data(tmp_path / "data")
        server.start()
        eventually(lambda: "its server was restarted" in log.read_text())
        with open_store(server.url) as store:
            conversation.append(call())
            eventually(lambda: len(store.calls.page(9, state="answered")) == 1)
        server.kill()
        server.put_back(tmp_path / "data")
        eventually(lambda: is_up(0.0))
        conversation += [{"role": "user", "content": "more"}]
        conversation.append(call())
        server.start()
        eventually(lambda: is_up(1.0))
        call({"role": "user", "content": "and more"})
        with open_store(server.url) as store:
            eventually(lambda: len(store.calls.page(9, state="answered")) == 2)
        assert process.stop() == 0
        assert verify(server.url).findings == []
