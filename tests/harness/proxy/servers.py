"""Real servers for tests: an ASGI application on uvicorn in a thread, and a proxy in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from tests.harness.ports import free_port

ROOT = Path(__file__).parents[3]


class _ThreadedServer(uvicorn.Server):
    """uvicorn's server without its polling: it stops within a second of `end`, once its calls are done."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._wake: Callable[[], object] = lambda: None

    def end(self) -> None:
        """Stop the server, from any thread."""
        self.should_exit = True
        self._wake()

    async def main_loop(self) -> None:
        loop, result = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(result.set)
        await self.on_tick(0)
        if not self.should_exit:
            await result.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.002)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def served(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serve an application in a thread; the value is its URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", log_config=None, access_log=False, ws="none", proxy_headers=False,
        timeout_keep_alive=75,  # as the proxy: a thread that gets no time for 5 s would close connections with requests
    )  # fmt: skip
    server = _ThreadedServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        thread.join(60)
        listener.close()
    assert not thread.is_alive(), "the server did not stop"


class ProxyProcess:
    """A proxy in its own process, as `ratchet proxy` runs it."""

    def __init__(self, folder: Path, errors: Any = None, command: Any = (), **settings: Any) -> None:
        """`errors` is the file to log to instead of `proxy.log` in its folder. `command` runs it, as `env` would."""
        program = (
            "import json, sys; from ratchet.proxy.supervisor.supervisor import serve; "
            "from ratchet.proxy.settings import ProxySettings; "
            "from ratchet.proxy.telemetry import logs; "
            "settings = ProxySettings(**json.loads(sys.argv[1])); "
            "logs.configure_logging(settings.log_format, settings.log_level); "
            "sys.exit(serve(settings, lambda url: print(url, flush=True)))"
        )
        values = {"model": "agent", "port": 0, "journal": str(folder / "journal"), "store": str(folder / "store.db")}
        log = folder / "proxy.log"
        with log.open("a") as usual:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-c", program, json.dumps(values | settings)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=usual if errors is None else errors,
                text=True,
            )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, log.read_text()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send SIGTERM, or another signal that ends it; return the exit status."""
        return self._end(number)

    def _end(self, number: int) -> int:
        os.kill(self.pid, number)
        status = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


class VllmProcess:
    """A scripted vLLM in its own process, which can be killed and restarted at its address."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it without adapters; return when it answers."""
        command = [sys.executable, "-m", "tests.harness.proxy.scripted_vllm", str(self._port)]
        self._process = subprocess.Popen(command, cwd=ROOT)
        eventually(self._answers)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(60)

    def _answers(self) -> bool:
        return _listens(self._port)


def spoil(*paths: Path) -> None:
    """Overwrite files in use with random bytes, as a failing disk does. Sizes stay: SQLite maps one into memory."""
    for path in paths:
        with path.open("r+b") as file:
            file.write(b"not a database any more" * 2000)


def overwrite_table(file: Path, table: str, pattern: bytes) -> bytes:
    """Fill the first page of a table, as a failing disk does; return what was there."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with file.open("r+b") as raw:
        raw.seek((page - 1) * size)
        before = raw.read(size)
        raw.seek((page - 1) * size)
        raw.write(pattern * (size // len(pattern)))
    return before


@contextlib.contextmanager
def scripted_process(module: str, *arguments: str) -> Iterator[str]:
    """Run `python -m MODULE ARGUMENTS... PORT` on a free port; the value is its URL, once it answers."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", module, *arguments, str(port)], cwd=ROOT)
    try:
        eventually(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


def leave(url: str, body: Any, at_work: Callable[[], object], key: str = "k") -> None:
    """POST a call, wait until it is being served, and close the connection without an answer."""
    address, payload = urlsplit(url), json.dumps(body).encode()
    head = f"POST {address.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        eventually(at_work)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def eventually(claim: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the claim's first true value; fail if it does not become true in time, long enough for busy machines."""
    until = time.monotonic() + seconds
    while True:
        value = claim()
        if value:
            return value
        assert time.monotonic() < until, "it did not become true in time"
        time.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition while the event loop runs; fail as `eventually` does."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
