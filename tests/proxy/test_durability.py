"""An answered call is a recorded call: kill -9, dead databases, broken disks, stops."""

from __future__ import annotations

import resource
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.proxy.journal.segments import records_end
from ratchet.store.states import CallState
from ratchet.store.store import Store, open_store
from ratchet.store.verify import verify
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.servers import ProxyProcess, eventually, leave, overwrite_table, spoil

BODY: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def ready(url: str) -> bool:
    return httpx.get(url + "/health/ready", timeout=60).status_code == 200


def wait_until_it_ships(url: str, store: Store) -> None:
    """Wait until the proxy serves and a call of it is in the store: a stop does not wait for long."""
    eventually(lambda: ready(url))
    assert httpx.post(url + "/v1/chat/completions", json=BODY, timeout=60).status_code == 200
    eventually(lambda: store.calls.page(9, state="answered"))


def running_calls(url: str) -> float:
    lines = httpx.get(url + "/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("ratchet_calls_in_flight "))


def test_a_locked_database_fails_no_call_and_gets_everything_later(proxy: Proxy, tmp_path: Path) -> None:
    blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    for _ in range(20):
        assert proxy.http.post("/v1/chat/completions", json=BODY).status_code == 200
    assert proxy.http.get("/health/backlog").json()["unshipped_records"] == 40
    blocker.rollback()
    blocker.close()
    proxy.settled()
    assert len(proxy.store.calls.page(100, state="answered")) == 20


@pytest.mark.slow
def test_a_dead_database_never_fails_a_call(start: Start, vllm_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    store = open_store(str(folder / "store.db"))
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], store=str(folder / "store.db"))
    eventually(lambda: ready(process.url))
    store.close()
    spoil(*folder.iterdir())
    with httpx.Client(base_url=process.url, timeout=60) as client:
        for _ in range(20):
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        assert client.get("/health/live").status_code == 200
        backlog = client.get("/health/backlog").json()
    assert backlog["unshipped_records"] > 0
    assert process.stop() == 0
    rescued = ProxyProcess(tmp_path, upstreams=[vllm_url])  # a new, empty database gets the journal's records
    store = open_store(str(tmp_path / "store.db"))
    eventually(lambda: len(store.calls.page(100, state="answered")) == 20)
    store.close()
    assert rescued.stop() == 0


@pytest.mark.slow
def test_a_damaged_table_is_an_alarm_and_the_store_is_not_up(vllm_url: str, tmp_path: Path, store: Store) -> None:
    overwrite_table(tmp_path / "store.db", "messages", b"\xa5")
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    eventually(lambda: ready(process.url))
    assert httpx.post(process.url + "/v1/chat/completions", json=BODY, timeout=60).status_code == 200
    eventually(lambda: "ratchet_store_up 0.0" in httpx.get(process.url + "/metrics").text)
    eventually(lambda: [alarm.name for alarm in store.alarms.active()] == ["store_damaged"])
    assert process.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "gone"])
def test_a_broken_disk_never_fails_a_call_and_gets_everything_later(vllm_url: str, tmp_path: Path, kind: str) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    eventually(lambda: ready(process.url))
    sizes = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    if kind == "full":  # for journal and database
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1200, sizes[1]))
    else:
        (tmp_path / "journal").rename(tmp_path / "elsewhere")
        (tmp_path / "journal").write_text("in the way")
    with httpx.Client(base_url=process.url, timeout=60) as client:
        for _ in range(20):
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        assert "ratchet_journal_errors_total 0.0" not in client.get("/metrics").text
        if kind == "full":
            eventually(lambda: "ratchet_store_up 0.0" in client.get("/metrics").text)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, sizes)
            eventually(lambda: "ratchet_store_up 1.0" in client.get("/metrics").text)
        else:
            (tmp_path / "journal").unlink()
        store = open_store(str(tmp_path / "store.db"))
        eventually(lambda: len(store.calls.page(100, state="answered")) == 20)
        eventually(lambda: [a for a in store.alarms.all() if a.name == "proxy_journal"])
        eventually(lambda: not store.alarms.active())
        store.close()
    assert process.stop() == 0


@pytest.mark.slow
def test_a_stop_while_the_journals_disk_is_full_stores_what_waits_in_memory(
    vllm_url: str, tmp_path: Path, store: Store
) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    wait_until_it_ships(process.url, store)
    eventually(lambda: httpx.get(process.url + "/health/backlog").json()["unshipped_records"] == 0)
    (tmp_path / "journal").rename(tmp_path / "elsewhere")
    (tmp_path / "journal").write_text("in the way")
    for _ in range(3):
        assert httpx.post(process.url + "/v1/chat/completions", json=BODY, timeout=60).status_code == 200
    assert process.stop() == 0
    assert [call.state for call in store.calls.page(9)] == [CallState.ANSWERED] * 4
    assert not store.alarms.active()
    assert "event=unwritten_records_stored" in (tmp_path / "proxy.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_lets_running_calls_end_and_ships_them(
    vllm_url: str, tmp_path: Path, store: Store, number: signal.Signals
) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    wait_until_it_ships(process.url, store)
    slow = BODY | {"messages": [{"role": "user", "content": "#tokens=60 #delay=0.05"}], "stream": True}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(httpx.post, process.url + "/v1/chat/completions", json=slow, timeout=60)
        eventually(lambda: running_calls(process.url) == 1)
        assert process.stop(number) == 0
        assert call.result().text.endswith("data: [DONE]\n\n")
    assert [c.state for c in store.calls.page(9)] == [CallState.ANSWERED] * 2
    assert store.proxy_instances.running("agent", time.time() - 60) == []


@pytest.mark.slow
def test_a_drain_is_unready_then_refuses_while_running_streams_end(vllm_url: str, tmp_path: Path, store: Store) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], drain_delay_seconds=1.0)
    wait_until_it_ships(process.url, store)
    body = BODY | {"messages": [{"role": "user", "content": "#tokens=120 #delay=0.05"}], "stream": True}
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(httpx.post, process.url + "/v1/chat/completions", json=body, timeout=60)
        eventually(lambda: running_calls(process.url) == 1)
        stopped = pool.submit(process.stop)
        readiness = eventually(lambda: [a for a in [httpx.get(process.url + "/health/ready")] if a.status_code == 503])[
            0
        ]
        assert "the proxy is stopping" in readiness.json()["missing"]
        assert httpx.post(process.url + "/v1/chat/completions", json=BODY).status_code == 200, (
            "calls are accepted while draining"
        )
        with pytest.raises(httpx.TransportError):
            eventually(lambda: httpx.get(process.url + "/health/live") is None)
        assert not call.done()
        assert call.result().text.endswith("data: [DONE]\n\n")
        assert stopped.result() == 0
    assert [call.state for call in store.calls.page(9)] == [CallState.ANSWERED] * 3


@pytest.mark.slow
def test_a_call_interrupted_by_a_stop_is_distinguished_from_one_whose_client_left(
    vllm_url: str, tmp_path: Path, store: Store
) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], drain_timeout_seconds=0.1)
    wait_until_it_ships(process.url, store)
    url = process.url + "/v1/chat/completions"
    slow = BODY | {"messages": [{"role": "user", "content": "#tokens=2000 #delay=0.03"}]}
    leave(url, slow, lambda: running_calls(process.url))
    eventually(lambda: not running_calls(process.url))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(httpx.post, url, json=slow, timeout=60)
        eventually(lambda: running_calls(process.url))
        assert process.stop() == 0
        assert call.result().status_code == 503
    calls = store.calls.page(9)[-2::-1]  # without the first one
    assert [call.state for call in calls] == [CallState.ABORTED, CallState.FAILED]
    assert [(call.status, call.error) for call in calls] == [
        (499, "the client disconnected"),
        (503, "the proxy was stopped"),
    ]


@pytest.mark.slow
def test_after_a_backup_was_restored_under_a_running_proxy_messages_are_stored_again(
    vllm_url: str, tmp_path: Path, store: Store
) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    wait_until_it_ships(process.url, store)
    file, backup = tmp_path / "store.db", tmp_path / "backup.db"
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    made = time.time()
    body = BODY | {"messages": [{"role": "system", "content": "a system prompt of every call"}, *BODY["messages"]]}
    answers = [httpx.post(process.url + "/v1/chat/completions", json=body, timeout=60)]
    eventually(lambda: len(store.calls.page(9, state="answered")) == 2)
    eventually(lambda: store.proxy_instances.running("agent", made))  # a heartbeat that the backup lacks
    for path in tmp_path.glob("store.db*"):
        path.unlink()
    backup.rename(file)
    eventually(lambda: "event=store_is_older" in (tmp_path / "proxy.log").read_text())
    answers.append(httpx.post(process.url + "/v1/chat/completions", json=body, timeout=60))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert process.stop() == 0
    assert verify(str(file)).findings == []
    with open_store(str(file)) as restored:
        assert len(restored.calls.page(9, state="answered")) == 2  # the backup's and the last one


SLOW = "#tokens=2000 #delay=0.03"
INTERRUPTED: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SLOW}]},
    "/v1/completions": {"prompt": SLOW},
    "/v1/responses": {"input": SLOW},
    "/v1/messages": {"messages": [{"role": "user", "content": SLOW}], "max_tokens": 9000},
}


@pytest.mark.slow
def test_calls_that_a_stop_interrupts_get_an_error_in_their_clients_format(
    vllm_url: str, tmp_path: Path, store: Store
) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], drain_timeout_seconds=0.1)
    wait_until_it_ships(process.url, store)
    begun: list[str] = []

    def send(path: str, body: dict[str, Any], streamed: bool) -> httpx.Response:
        given = {"model": "agent", "stream": streamed, **body}
        with httpx.stream("POST", process.url + path, json=given, timeout=60) as answer:
            begun.append(path)
            answer.read()
        return answer

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(send, path, body, one) for path, body in INTERRUPTED.items() for one in (False, True)]
        eventually(lambda: running_calls(process.url) == 8 and len(begun) == 4)
        assert process.stop() == 0
        answers = [call.result() for call in calls]
    for whole, stream in zip(answers[::2], answers[1::2], strict=True):
        assert (whole.status_code, whole.headers["retry-after"]) == (503, "1")
        assert "this proxy was stopped" in whole.json()["error"]["message"]
        assert stream.status_code == 200
        assert "this proxy was stopped" in stream.text.split("\n\n")[-2], stream.text[-200:]
    assert "Traceback" not in (tmp_path / "proxy.log").read_text()


def test_relaxed_capture_records_calls(start: Start) -> None:
    proxy = start(capture="relaxed")
    assert proxy.http.post("/v1/chat/completions", json=BODY).status_code == 200
    proxy.settled()
    assert len(proxy.store.calls.page(9, state="answered")) == 1


def test_a_messages_bytes_are_written_once(start: Start, tmp_path: Path) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "system", "content": "s" * 20_000}, {"role": "user", "content": "hi"}]
    for _ in range(20):
        assert proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": messages}).status_code == 200
    written = sum(records_end(path) for path in (tmp_path / "journal").glob("*.journal"))
    prompts = 20 * 4 * 20_050  # the token ids of every call, four bytes each
    assert written - prompts < 20_000 * 5
