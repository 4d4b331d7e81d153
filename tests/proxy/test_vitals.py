"""When a part of the proxy dies, the process reports it and ends, and no unrecorded call is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from ratchet.proxy.errors import NotReady
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.http import connections as connections_module
from ratchet.proxy.worker.http.connections import ClientConnection, ClientConnections
from tests.harness import records
from tests.harness.proxy.servers import ROOT, eventually

_PROXY = """
import asyncio, ctypes, json, sys, threading
from ratchet.proxy.telemetry import logs
from ratchet.proxy.server import serve
from ratchet.proxy.settings import ProxySettings

def end_a_part(loop):
    name = sys.stdin.readline().strip()
    for task in asyncio.all_tasks(loop):
        if task.get_name() == name:
            loop.call_soon_threadsafe(task.cancel)
    for thread in threading.enumerate():
        if thread.name == name:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

def on_listening(url):
    threading.Thread(target=end_a_part, args=(asyncio.get_running_loop(),), daemon=True).start()
    print(url, flush=True)

logs.configure_logging("text")
sys.exit(serve(ProxySettings(**json.loads(sys.argv[1])), on_listening))
"""


def _call(client: httpx.Client) -> None:
    """Make calls until the process has ended."""
    with contextlib.suppress(httpx.TransportError):
        for number in range(10):
            client.post(
                "/v1/chat/completions",
                json={"model": "agent", "messages": [{"role": "user", "content": f"{number}" * 1000}]},
            )


@pytest.mark.parametrize("part", ["policies", "keys", "slow-connection check", "shipper", "journal-preallocation"])
def test_a_dead_part_ends_the_process_and_is_reported_by_live_until_then(
    part: str, tmp_path: Path, vllm_url: str
) -> None:
    settings = {"upstreams": [vllm_url], "model": "agent", "port": 0}
    settings |= {
        "journal": str(tmp_path / "journal"),
        "store": str(tmp_path / "store.db"),
        "journal_segment_bytes": 2**12,
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", _PROXY, json.dumps(settings)], cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with httpx.Client(base_url=process.stdout.readline().strip(), timeout=60) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        assert client.get("/health/live").status_code == 200
        print(part, file=process.stdin, flush=True)
        calls = threading.Thread(target=_call, args=(client,))  # a thread dies at its next action
        calls.start()
        live = eventually(lambda: (answer := client.get("/health/live")).status_code == 503 and answer)
        assert client.get("/health/ready").status_code == 503
        assert f"task {part!r} died" in live.json()["reason"]
        calls.join()
    _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"event=task_died task={part}" in log
    assert "event=failed" in log


class _BrokenAlarmQueue(AlarmQueue):
    """An alarm queue that raises when an alarm is added."""

    def raise_alarm(self, name: str, reason: str) -> None:
        raise RuntimeError("the alarm queue broke")


async def test_after_the_journals_writer_died_nothing_counts_as_recorded(tmp_path: Path) -> None:
    deaths: list[str] = []
    critical_tasks = CriticalTasks()
    critical_tasks.on_failure = lambda: deaths.append(str(critical_tasks.failure))
    journal = Journal(tmp_path / "journal", 2**20, 2**16, ProxyMetrics(), _BrokenAlarmQueue(), critical_tasks)
    await journal.start()
    assert await journal.commit(records.call_start("call_1", "t"))
    journal.folder.rename(tmp_path / "elsewhere")
    (tmp_path / "journal").write_text("in its place")
    with pytest.raises(NotReady, match="writer died"):
        await journal.commit(records.call_start("call_2", "t"))
    with pytest.raises(NotReady, match="writer died"):
        await journal.commit(records.call_start("call_3", "t"))
    await asyncio.to_thread(eventually, lambda: deaths)
    (death,) = deaths
    assert re.search("'journal'.*RuntimeError: the alarm queue broke", death)
    await journal.stop()


@pytest.mark.parametrize(("seconds", "more"), [(60.0, b"connection: close"), (0.01, b"")])
async def test_an_idle_connection_serves_a_request_that_its_server_meets_while_it_stops(
    seconds: float, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(connections_module, "_NEXT_REQUEST_SECONDS", seconds)
    config, made = Config(app, ws="none"), list[ClientConnection]()

    def make() -> ClientConnection:
        made.append(ClientConnection(ClientConnections(9, 60.0, 60.0), config, ServerState(), {}))
        return made[-1]

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    made[0].shutdown()
    if more:
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    rest = await reader.read()
    assert rest.startswith(b"HTTP/1.1 200 " if more else b"")
    assert more in rest
    writer.close()
    server.close()


class _BrokenConnection(ClientConnection):
    """A connection whose check fails."""

    def check(self, now: float) -> None:
        raise OSError("bad file descriptor")


async def test_a_connection_whose_check_fails_is_closed_and_the_others_are_checked_on() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    loop, connections, made = (
        asyncio.get_running_loop(),
        ClientConnections(9, 0.2, 1.0),
        [_BrokenConnection, ClientConnection, _BrokenConnection, ClientConnection],
    )
    config = Config(app, ws="none")
    server = await loop.create_server(lambda: made.pop(0)(connections, config, ServerState(), {}), "127.0.0.1", 0)
    watch = asyncio.create_task(connections.close_slow())
    host, port = server.sockets[0].getsockname()
    for _ in range(2):
        slow = [await asyncio.open_connection(host, port) for _ in range(2)]
        for _, writer in slow:
            writer.write(b"GET / HTTP/1.1\r\n")
        sick, well = [await reader.read() for reader, _ in slow]
        assert sick == b""
        assert well.startswith(b"HTTP/1.1 408 ")
        for _, writer in slow:
            writer.close()
    watch.cancel()
    server.close()
