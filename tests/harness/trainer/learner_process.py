"""`ratchet learner` as a process, on this host or in the namespace of another machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from ratchet.trainer.errors import LearnerUnreachable
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.learner_client import LearnerConnection
from tests.harness.ports import free_port
from tests.harness.proxy.servers import ROOT
from tests.harness.trainer.two_machines import Machine

TOKEN = "a token"
HERE = Machine("127.0.0.1", (), {})


class LearnerProcess:
    """`ratchet learner` with the settings that are given, on a machine; its output is in a file."""

    def __init__(self, folder: Path, model: Path, machine: Machine = HERE, **learner: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.checkpoints = folder / "default" / "models"
        self.port = learner.setdefault("port", free_port())
        self.log = folder / f"learner{learner.get('machine_rank', '')}.log"
        config = folder / f"ratchet{learner.get('machine_rank', '')}.yaml"
        settings = {"base_model": str(model), "state_dir": str(folder), "learner": {"threads": 1} | learner}
        config.write_text(json.dumps(settings))
        environment = {**os.environ, **machine.environment, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: TOKEN}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*machine.prefix, sys.executable, "-P", "-m", "ratchet", "--config", str(config), "learner"],
                cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.connection = LearnerConnection(f"http://{machine.address}:{self.port}", TOKEN)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.connection.status().ready
        except LearnerUnreachable:
            return False

    def pids(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid)
        return [found, *found.children(recursive=True)]

    def member(self, rank: int) -> psutil.Process:
        """The process of this rank; torchrun has none."""
        return next(process for process in self.pids() if process.environ().get("RANK") == str(rank))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the process, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)
