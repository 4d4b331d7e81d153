"""The servers that `proxy_overhead` compares: Ratchet's proxy as it runs by default, the floor, LiteLLM's proxy.

Each runs alone on one core. LiteLLM comes from a virtual environment of its own, made here at the first run; where it
cannot be made or started, `NotRun` says why. Linux only: cores are set, and CPU time is read from /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.wire_load import Target
from benchmarks.wire_upstream import MODEL
from tests.harness.proxy.servers import ROOT, ProxyProcess

LITELLM = "litellm[proxy]>=1.100,!=1.107.0"  # 1.107.0: reported as compromised
_HOME = Path(sys.prefix) / "bench" / "litellm"
CAPTURE_FIELDS = {"logprobs": True, "return_token_ids": True}  # fields that Ratchet adds to every request
_QUIET = 0.01  # of a core for each process: a server that takes less is at rest


class NotRun(Exception):
    """A server could not be measured, and why."""


@dataclass(frozen=True)
class Contender:
    """A server under test, and where calls to it go."""

    pid: int
    target: Target
    writer: int | None = None  # the process that writes to the store, if there is one

    @contextlib.contextmanager
    def without_writer(self) -> Iterator[None]:
        """Stop the store's writer meanwhile, as if it had a core and a disk of its own; then wait until it is done."""
        if self.writer is None:
            raise NotRun("this server has no writer of its own")
        self.rest()
        os.kill(self.writer, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.writer, signal.SIGCONT)
        self.rest()

    def cpu(self) -> float:
        """Return the CPU seconds that all its processes and threads have taken."""
        return sum(_thread_seconds(path) for pid in self._pids() for path in Path(f"/proc/{pid}/task").iterdir())

    def memory(self) -> list[float]:
        """Return the resident MB of each of its processes, the one that serves first."""
        return [psutil.Process(pid).memory_info().rss / 2**20 for pid in self._pids()]

    def rest(self, most_seconds: float = 60.0) -> float:
        """Wait until it has done what it does after the answers; return the seconds of that."""
        started = time.monotonic()
        before, quiet = self.cpu(), _QUIET * max(2, len(self._pids()))
        while time.monotonic() - started < most_seconds:
            time.sleep(0.3)
            now = self.cpu()
            if now - before < 0.3 * quiet:
                return time.monotonic() - started - 0.3
            before = now
        return most_seconds

    def _pids(self) -> list[int]:
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]


def _thread_seconds(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started inside the block runs on this core, and so does this process."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def upstream(core: int) -> Iterator[int]:
    """Run the cheap upstream; the value is its port."""
    port = free_port()
    with _process(core, [sys.executable, "-m", "benchmarks.wire_upstream", str(port)]):
        wait_for(f"http://127.0.0.1:{port}/v1/models", 20)
        yield port


@contextlib.contextmanager
def ratchet(core: int, folder: Path, port: int, workers: int = 1) -> Iterator[Contender]:
    """Run Ratchet's proxy with its own defaults: capture strict, one line per call, exact context where offered."""
    with on_core(core):
        proxy = ProxyProcess(folder, upstreams=[f"http://127.0.0.1:{port}"], workers=workers)
    try:
        wait_for(f"{proxy.url}/health/ready", 20)
        yield Contender(proxy.pid, Target(int(proxy.url.rsplit(":", 1)[1]), "agent"), _writer_of(proxy.pid))
    finally:
        proxy.stop()


def _writer_of(pid: int) -> int | None:
    """Return the writer of a proxy that is one process and its writer, else None."""
    children = psutil.Process(pid).children(recursive=True)
    return children[0].pid if len(children) == 1 else None


@contextlib.contextmanager
def floor(core: int, folder: Path, port: int, *, synced: bool = False) -> Iterator[Contender]:
    """Run the floor: uvicorn and aiohttp, passing bytes on; `synced`: it also syncs each call to a file."""
    own = free_port()
    command = [sys.executable, "-m", "benchmarks.floor", str(own), f"http://127.0.0.1:{port}"]
    command += [str(folder / "calls")] if synced else []
    with _process(core, command) as process:
        wait_for(f"http://127.0.0.1:{own}/v1/models", 20)
        yield Contender(process.pid, Target(own, MODEL, CAPTURE_FIELDS))


@contextlib.contextmanager
def litellm(core: int, folder: Path, port: int) -> Iterator[Contender]:
    """Run LiteLLM's proxy without a database. Raises NotRun."""
    prepare_litellm()
    own = free_port()
    model = {"model": f"hosted_vllm/{MODEL}", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": "none"}
    configuration = folder / "litellm.json"  # JSON is YAML
    configuration.write_text(json.dumps({"model_list": [{"model_name": "agent", "litellm_params": model}]}))
    command = [
        str(_HOME / "bin" / "litellm"),
        "--config",
        str(configuration),
        "--host",
        "127.0.0.1",
        "--port",
        str(own),
    ]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}
    key = f"sk-{secrets.token_hex(32)}"  # without one it does not start
    with _process(core, command, quiet | {"LITELLM_MASTER_KEY": key}) as process:
        wait_for(f"http://127.0.0.1:{own}/health/liveliness", 120)
        yield Contender(process.pid, Target(own, "agent", CAPTURE_FIELDS, key))


def prepare_litellm() -> str:
    """Set LiteLLM up, once; return its version. Raises NotRun."""
    python = _HOME / "bin" / "python"
    if not (python.parent / "litellm").exists():
        venv.create(_HOME, with_pip=True, clear=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", LITELLM],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            raise NotRun(f"pip install {LITELLM!r}: {lines[-1]}")
    result = subprocess.run(
        [python, "-c", "import importlib.metadata; print(importlib.metadata.version('litellm'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return result.stdout.strip()


@contextlib.contextmanager
def _process(core: int, command: list[str], more: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server on a core; it is ended with the block."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(more or {})
    with on_core(core):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, seconds: float) -> None:
    """Wait until a server answers 200. Raises NotRun."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise NotRun(f"{url} did not answer within {seconds:g} s")


def cores() -> tuple[int, int]:
    """Return the core for the server and the one for everything else. Raises NotRun."""
    free = sorted(os.sched_getaffinity(0))
    if len(free) < 2:
        raise NotRun("it takes two cores: one for the server, one for the load")
    return free[0], free[1]


def free_port() -> int:
    """Return a port that nobody holds now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
