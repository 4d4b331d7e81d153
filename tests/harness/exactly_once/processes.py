"""Processes that the exactly-once campaign kills and restarts, and its agents."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.harness.proxy.servers import ROOT

ALIAS = "agent"
AGENTS = 3


class RestartableProcess:
    """`python -m tests.harness.trainer.scripted_processes NAME VALUE`, which can be killed and restarted."""

    def __init__(self, name: str, value: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", "tests.harness.trainer.scripted_processes", name, value]
        self._environment = os.environ | dict(environment or {})
        self.log = log
        self.start()

    def start(self) -> None:
        """Start the process."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stderr=log, stdout=log)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.process.kill()
        self.process.wait(60)

    @property
    def exited(self) -> bool:
        """Whether the process has exited."""
        return self.process.poll() is not None


class PairingAgents:
    """Clients that attempt each task twice, so GRPO can compare them; `answered` holds trajectory ids."""

    def __init__(self, url: str, pause: float) -> None:
        self.answered: set[str] = set()
        self._url = url
        self._pause = pause
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(AGENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after the calls in progress."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30.0) as client:
            while not self._stop.wait(self._pause):
                task = f"task/{uuid.uuid4().hex[:12]}"
                for attempt in range(2):
                    while not self._attempt(client, task, attempt) and not self._stop.wait(0.2):
                        pass

    def _attempt(self, client: httpx.Client, task: str, attempt: int) -> bool:
        name = f"run-{uuid.uuid4().hex}"
        body = {"model": ALIAS, "messages": [{"role": "user", "content": f"{task} {attempt} #tokens=4"}]}
        headers = {"x-ratchet-trajectory": name, "x-ratchet-task": task}
        try:
            answer = client.post("/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError:
            return False
        if answer.status_code == 200:
            self.answered.add(name)
        return answer.status_code == 200
