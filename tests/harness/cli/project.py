"""A project in a temporary folder, and the `ratchet` command run in it as a user runs it: as a process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ratchet import cli
from ratchet.supervisor.pidfile import kill_tree
from tests.harness.ports import free_port
from tests.harness.trainer.tiny import build_tiny_model

ROOT = Path(__file__).parents[3]
SCRIPTED_VLLM = Path(__file__).with_name("scripted_vllm.py")

# A shell shows both as 130. CPython ends a process by SIGINT itself, whatever the program returns, if Ctrl-C met code
# that was executed from a string, such as a data class during an import.
INTERRUPTED = (130, -signal.SIGINT)


def wait_for(what: str, holds: Callable[[], bool], seconds: float = 60.0, pause: float = 0.05) -> None:
    """Wait until `holds` returns true; otherwise fail and name `what`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Project:
    """A folder with the files of a model, and a ratchet.yaml that starts the scripted vLLM."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.helper = folder / "helper.pid"
        self.command = [sys.executable, "-P", "-m", "ratchet"]  # -P: as the `ratchet` script
        self._started: list[subprocess.Popen[str]] = []
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        (model / "model.safetensors").write_bytes(b"")
        (model / "tokenizer.json").write_text("{}")
        self.content: dict[str, Any] = {
            "base_model": str(model),
            "min_free_disk_mb": 1,
            "vllm": {"command": [sys.executable, str(SCRIPTED_VLLM)], "port": free_port()},
            "proxy": {"port": free_port()},
        }
        self.write(**settings)

    def write(self, **settings: Any) -> None:
        """Change settings and write ratchet.yaml (JSON is YAML)."""
        self.content |= settings
        (self.folder / "ratchet.yaml").write_text(json.dumps(self.content))

    def make_trainable(self, **settings: Any) -> None:
        """Serve a tiny model's name from a scripted vLLM that answers calls; write the task set `tasks`."""
        model = build_tiny_model(self.folder / "tiny", hidden=32, layers=1)
        engine = {"command": [sys.executable, "-m", "tests.harness.proxy.scripted_vllm"]}
        self.write(base_model=str(model), vllm=self.content["vllm"] | engine, learner={"threads": 1}, **settings)
        (self.folder / "tasks").mkdir()
        for split, start in (("train", 0), ("test", 10)):
            rows = [json.dumps({"question": f"number {start + number}? #say=so"}) for number in range(6)]
            (self.folder / "tasks" / f"{split}.jsonl").write_text("\n".join(rows))

    @property
    def state(self) -> Path:
        """The project's state folder."""
        return self.folder / ".ratchet" / "default"

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start `ratchet ARGUMENTS`; stdout and stderr share one pipe."""
        return self._start(arguments, environ, subprocess.STDOUT)

    def _start(self, arguments: Sequence[str], environ: dict[str, str], stderr: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.command, *arguments],
            cwd=self.folder,
            env=self._environ(environ),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, seconds: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `ratchet ARGUMENTS` to its end, `seconds` at most; stdout contains stderr."""
        process = self.start(*arguments, **environ)
        output, _ = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(arguments, process.returncode, output)

    def json(self, *arguments: str, seconds: float = 60) -> Any:
        """Run `ratchet ARGUMENTS --json` to its end; return the JSON on stdout."""
        process = self._start([*arguments, "--json"], {}, subprocess.PIPE)
        stdout, stderr = process.communicate(timeout=seconds)
        assert process.returncode == 0, stderr
        return json.loads(stdout)

    def call(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `ratchet ARGUMENTS` in this process; stdout and stderr come together.

        Saves the second that a process takes to import everything. For commands that start no process, wait for no
        signal and import no code of the user.
        """
        output = io.StringIO()
        folder, inherited = Path.cwd(), dict(os.environ)
        try:
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update(self._environ(environ))
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = cli.run(list(arguments))
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(inherited)
        return subprocess.CompletedProcess(arguments, code, output.getvalue())

    def up(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start `ratchet up` and return it once every service is ready."""
        process = self.start("up", *arguments, **environ)

        def is_ready() -> bool:
            running = self.running()
            return process.poll() is not None or (running.get("pid") == process.pid and running["ready"])

        wait_for("the project is ready", is_ready, seconds=120)
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        return process

    def running(self) -> dict[str, Any]:
        """Return the processes that `up` recorded; empty before that."""
        try:
            return dict(json.loads((self.state / "run" / "running.json").read_text()))
        except (OSError, ValueError):
            return {}

    def pids(self) -> list[int]:
        """Return every process of the project: services, process guards and the vLLM's helper."""
        files = [file for file in (self.state / "run").glob("*.pid") if file.name != "up.pid"]
        return [int(file.read_text().split()[0]) for file in (*files, self.helper)]

    def stop(self) -> None:
        """Leave nothing running."""
        for name in (
            "up",
            "vllm.process_guard",
            "proxy.process_guard",
            "trainer.process_guard",
            "vllm",
            "proxy",
            "trainer",
        ):
            file = self.state / "run" / f"{name}.pid"
            if file.exists() and is_alive(pid := int(file.read_text().split()[0])):
                kill_tree(psutil.Process(pid))
        if self.helper.exists() and is_alive(pid := int(self.helper.read_text())):
            os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _environ(self, environ: dict[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
        ours = {"PYTHONPATH": str(ROOT), "SCRIPTED_VLLM_HELPER": str(self.helper)}
        return inherited | ours | environ
