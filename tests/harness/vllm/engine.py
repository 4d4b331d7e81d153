"""A real vLLM for a test, started with the project's own command and stopped with all its processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from ratchet.settings.project_settings import Settings
from ratchet.supervisor.pidfile import kill_tree
from ratchet.supervisor.vllm_command import build_command
from tests.harness.ports import free_port


@contextlib.contextmanager
def vllm(model: Path, log: Path, *arguments: str, max_model_len: int = 4096) -> Iterator[str]:
    """Serve a model folder; the value is vLLM's URL."""
    settings = Settings.of(
        {"base_model": str(model), "vllm": {"max_model_len": max_model_len, "extra_args": list(arguments)}}
    )
    server = VllmServerProcess(settings, log)
    try:
        server.wait()
        yield server.url
    finally:
        server.kill()


class VllmServerProcess:
    """A vLLM that may be suspended, killed and started again on its port. `wait` waits until it answers.

    Without `adapters` it is a plain server of one model, as a teacher's.
    """

    def __init__(
        self,
        settings: Settings,
        log: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        adapters: bool = True,
    ) -> None:
        self._log = log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        command = build_command(settings, self._port)
        self._arguments = tuple(command.arguments) if adapters else _without_adapters(command.arguments)
        self._environment = os.environ | dict(command.environment) | dict(environment)
        if not adapters:
            del self._environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
        self.start()

    def start(self) -> None:
        """Start the server."""
        with self._log.open("a") as text:
            self._process = subprocess.Popen(
                self._arguments, env=self._environment, stdout=text, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        _wait(self._process, self.url, self._log)

    def suspend(self) -> None:
        """Stop every process of the server with SIGSTOP: it hangs."""
        for process in self._tree():
            process.suspend()

    def resume(self) -> None:
        """Let the server go on."""
        for process in self._tree():
            process.resume()

    def kill(self) -> None:
        """Kill every process of the server."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it did not start; the failure is reported elsewhere
            kill_tree(psutil.Process(self._process.pid))
        self._process.wait(60)

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]


def _without_adapters(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return vLLM's arguments without those of LoRA."""
    kept = [one for one in arguments if one != "--enable-lora"]
    for name in ("--max-lora-rank", "--max-loras", "--max-cpu-loras"):
        place = kept.index(name)
        del kept[place : place + 2]
    return tuple(kept)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, f"vLLM did not start: {log.read_text()[-3000:]}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.3)
