"""Runs the programs of `programs/` and `node/`: each in its own environment, with a base URL, a key and questions."""

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
    """A program and where it runs: `environment` is a file of `requirements/`, or `node`.

    `script` is a file of `programs/`, or of `node/`, or else of an npm package.
    """

    name: str
    environment: str
    script: str
    arguments: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command. Fails, with the remedy, where the environment is not set up."""
        if os.environ.get(SKIP):
            pytest.skip(f"{SKIP} is set")
        if self.environment == "node":
            if shutil.which("node") is None:
                pytest.skip("node is not installed; Ratchet does not need it")
            modules = _made(HOME / "node" / "node_modules")
            own = HERE / "node" / self.script
            return ["node", str(own if own.exists() else modules / self.script), *self.arguments]
        python = _made(HOME / self.environment / "bin" / "python")
        return [str(python), str(HERE / "programs" / self.script), *self.arguments]

    def run(self, url: str, asked: Sequence[dict[str, Any]], seconds: float = 120.0) -> list[dict[str, Any]]:
        """Put the questions to the program's agent at `url`; return its results. Fails with its own words."""
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
            self.command(), input=json.dumps(asked), env=environ, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{self.name}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        results = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(results) == len(asked), done.stdout
        return results


def _made(path: Path) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make clients`, or leave these tests out with {SKIP}=1", pytrace=False)
    return path
