"""All three methods of the tuner on the e-mail example, in one project, and the report that stands them side by side.

Real vLLM, the tiny policy. The reflection model of the prompt tuning is a scripted stand-in that proposes a few prompts
in turn; the tiny policy was taught with one fixed prompt, so that no gain is to be expected of another. Model selection
comes last: the version before against the one that training has made live, and the one half way.

    python -m benchmarks.three_methods [--rounds 10] [--rollouts 500] [--seed 1] [--png FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.prompt_tuning import Proposals
from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.cli.project import ROOT, Project

EXAMPLE = "ratchet.demo.email_search"
ALIAS = "email-agent"


class ThreeMethodsRun:
    """One project on the example, and the commands in it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._mail = folder / "mail"
        self._seed = str(seed)
        self._environ = {"EMAIL_SEARCH_HOME": str(self._mail)}
        made = [sys.executable, "-m", EXAMPLE, "build-db", "--home", str(self._mail)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)} | self._environ
        subprocess.run(made, cwd=ROOT, env=environ, check=True, capture_output=True)
        self.project = Project(folder)
        given = yaml.safe_load((ROOT / "ratchet" / "demo" / "email_search" / "ratchet.yaml").read_text())
        given["vllm"] |= {"port": self.project.content["vllm"]["port"]}
        given["tuner"] |= {"tasks": str(self._mail)}
        given["base_model"] = str(ROOT / given["base_model"])
        self.project.write(**{name: value for name, value in given.items() if name != "project"})

    def ratchet(self, *words: str, codes: Sequence[int] = (0,), seconds: float = 1200) -> str:
        """Run a command to its end, print what it said and how long it took."""
        started = time.monotonic()
        done = self.project.run(*words, seconds=seconds, **self._environ)
        print(
            f"$ ratchet {' '.join(words)}   ({time.monotonic() - started:.0f} s, {done.returncode})\n{done.stdout}",
            flush=True,
        )
        assert done.returncode in codes, done.returncode
        return done.stdout

    def tune(self, method: str, *words: str) -> None:
        """Run one method; that it found nothing better is no failure."""
        self.ratchet("tune", method, "--seed", self._seed, *words, codes=(0, 3))


def measure(folder: Path, rounds: int, rollouts: int, seed: int, png: Path | None) -> None:
    """Run all three and print the report."""
    run = ThreeMethodsRun(folder, seed)
    try:
        run.ratchet("up", "--detach", seconds=400)
        with ScriptedReflectionModel(Proposals()) as reflection:
            run.tune(
                "prompt", "--max-rollouts", str(rollouts),
                "--reflection-url", reflection.base_url, "--reflection-model", "scripted stand-in",
            )  # fmt: skip
        run.tune(
            "weights", "--rounds", str(rounds), "--tasks-per-round", "16", "--attempts", "8",
            "--eval-every", str(max(1, rounds // 2)),
        )  # fmt: skip
        versions = json.loads(run.ratchet("policies", "list", "--json"))
        live = max(one["version"] for one in versions if one["state"] == "live")
        names = [word for version in sorted({0, live // 2, live}) for word in ("--candidate", f"{ALIAS}@{version}")]
        run.tune("select-model", *names)
        run.ratchet("tune", "report")
        run.ratchet("tune", "report", "--markdown", *(["--png", str(png.absolute())] if png else []))
        run.ratchet("down", seconds=90)
    finally:
        run.project.stop()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.rounds, given.rollouts, given.seed, given.png)


if __name__ == "__main__":
    main()
