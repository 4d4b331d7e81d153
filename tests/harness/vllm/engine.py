"""A real vLLM for a test, started with the project's own command and stopped with all its processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from ratchet.settings.project_settings import Settings
from ratchet.supervisor.leftover_processes import kill_tree
from ratchet.supervisor.vllm_command import build_command
from tests.harness.ports import free_port


@contextlib.contextmanager
def vllm(model: Path, log: Path, *arguments: str, max_model_len: int = 4096) -> Iterator[str]:
    """Serve a model folder; the value is vLLM's URL."""
    port = free_port()
    settings = Settings.model_validate(
        {"base_model": str(model), "vllm": {"max_model_len": max_model_len, "extra_args": list(arguments)}}
    )
    engine = build_command(settings, port)
    with log.open("w") as text:
        process = subprocess.Popen(
            engine.arguments, env=os.environ | dict(engine.environment), stdout=text, stderr=subprocess.STDOUT
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # it did not start; the failure is reported above
                kill_tree(psutil.Process(process.pid))
            process.wait(20)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, f"vLLM did not start: {log.read_text()[-3000:]}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.3)
