"""Runs the client programs of tests/clients, each in an environment of its own, against a base URL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "clients"
HOME = Path(sys.prefix) / "clients"
SKIP = "RATCHET_SKIP_CLIENTS"


@dataclass(frozen=True)
class Program:
    """A client program. `environment`: a file of `requirements/`, or `node`.

    `script`: a file of `programs/` or `node/`, or of an npm package.
    """

    name: str
    environment: str
    script: str
    arguments: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command. Fails, with the remedy, if the environment is not set up."""
        if os.environ.get(SKIP):
            pytest.skip(f"{SKIP} is set")
        if self.environment == "node":
            if shutil.which("node") is None:
                pytest.skip("node is not installed; Ratchet does not need it")
            modules = _existing(HOME / "node" / "node_modules")
            own = HERE / "node" / self.script
            return ["node", str(own if own.exists() else modules / self.script), *self.arguments]
        python = _existing(HOME / self.environment / "bin" / "python")
        return [str(python), str(HERE / "programs" / self.script), *self.arguments]

    def run(self, url: str, questions: Sequence[dict[str, Any]], seconds: float = 120.0) -> list[dict[str, Any]]:
        """Send the questions to the program's agent; return its results. Fails with the program's output."""
        environ = {
            **os.environ,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "x",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "x",
            "NODE_PATH": str(HOME / "node" / "node_modules"),
            "PYTHONDONTWRITEBYTECODE": "",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        environ.pop("PYTHONPATH", None)
        done = subprocess.run(
            self.command(), input=json.dumps(questions), env=environ, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{self.name}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        results = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(results) == len(questions), done.stdout
        return results


def client_python(environment: str) -> Path:
    """Return the interpreter of a client environment. Fails, with the remedy, if it is not set up."""
    return client_program(environment, "bin/python")


def client_program(environment: str, name: str) -> Path:
    """Return a program that is no client of Python. Fails, with the remedy, if it is not set up."""
    if os.environ.get(SKIP):
        pytest.skip(f"{SKIP} is set")
    return _existing(HOME / environment / name)


def compatcanary_report(url: str, model: str, profile: str) -> dict[str, Any]:
    """Run CompatCanary, a public scanner of OpenAI-compatible APIs; return its report."""
    target = ["--base-url", f"{url}/v1", "--model", model, "--api-key", "x", "--profile", profile]
    command = [*COMPATCANARY.command(), "scan", *target, "--format", "json", "--fail-on", "never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _existing(path: Path) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make clients`, or leave these tests out with {SKIP}=1", pytrace=False)
    return path


COMPATCANARY = Program("compatcanary", "node", "compatcanary/src/cli.js")
