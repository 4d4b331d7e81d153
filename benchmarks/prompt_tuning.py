"""`python -m benchmarks.prompt_tuning`: `ratchet tune prompt` on the e-mail example, real vLLM, tiny policy.

The reflection model is a scripted stand-in: it proposes the prompts of PROPOSALS in turn, whatever it is shown. What is
measured is the whole command: seed, search, held-out tasks, cost. The tiny policy was taught with one fixed prompt, so
that no gain is to be expected of it; a verdict of `better` would have to be explained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.cli.project import ROOT, Project

EXAMPLE = "ratchet.demo.email_search"
PROPOSALS = (
    "{prompt} Search first, then read the mail that fits, then answer.",
    "{prompt} Answer with one word.",
    "Search the inbox with the tools. Read the mail that fits, then give the answer with return_final_answer.",
    "{prompt} Use the name of the person and the topic as keywords.",
    "You are careful. {prompt}",
    "Search the inbox with the tools.",
)


class Proposals:
    """Proposes one text after the other, made from the agent's own prompt."""

    def __init__(self) -> None:
        self._turns = itertools.cycle(PROPOSALS)
        self._seed: str | None = None

    def __call__(self, prompt: str, rows: Sequence[Mapping[str, Any]]) -> str:
        self._seed = self._seed or prompt
        return next(self._turns).format(prompt=self._seed)


def tuned(rollouts: int, held_out: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run the command once in a project of its own; return its record."""
    environ = {**os.environ, "EMAIL_SEARCH_HOME": str(folder / "mail"), "PYTHONPATH": str(ROOT)}
    made = [sys.executable, "-m", EXAMPLE, "build-db", "--home", str(folder / "mail")]
    subprocess.run(made, cwd=ROOT, env=environ, check=True, capture_output=True)
    project = Project(folder)
    vllm = {"port": project.content["vllm"]["port"], "max_model_len": 1024, "dtype": "float32", "max_num_seqs": 64}
    project.write(base_model=str(ROOT / "ratchet" / "demo" / "email_search" / "policy"), vllm=vllm, model="email-agent")
    kept = {"EMAIL_SEARCH_HOME": environ["EMAIL_SEARCH_HOME"]}
    try:
        up = project.run("up", "--detach", seconds=300, **kept)
        assert up.returncode == 0, up.stdout
        with ScriptedReflectionModel(Proposals()) as reflection:
            words = [
                "tune", "prompt", "--tasks", str(folder / "mail"), "--workflow", f"{EXAMPLE}.agent:workflow",
                "--judge", f"{EXAMPLE}.judge:judge", "--max-rollouts", str(rollouts),
                "--held-out-tasks", str(held_out), "--seed", str(seed), "--concurrency", "32",
                "--reflection-url", reflection.base_url, "--reflection-model", "scripted-reflection",
            ]  # fmt: skip
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "ratchet", *words], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True,
                timeout=900, check=True,
            )  # fmt: skip
            seconds = time.monotonic() - started
        print(done.stdout, flush=True)
        (run,) = json.loads(project.run("tune", "runs", "--json").stdout)
        project.run("down", seconds=60)
        return {"seconds": seconds, **run["result"]}
    finally:
        project.stop()


def main() -> None:
    """Run it and print a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=800)
    parser.add_argument("--held-out", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tuned(chosen.rollouts, chosen.held_out, chosen.seed, Path(folder))
    details, gain = found["details"], found.get("gain")
    print(json.dumps(details["validation"], indent=1))
    shown = "not compared" if gain is None else (
        f"{gain['against_mean']:.3f} -> {gain['mean']:.3f}, {gain['difference']:+.3f} "
        f"({gain['low']:+.3f} to {gain['high']:+.3f}) on {gain['tasks']}"
    )  # fmt: skip
    budget = details["budget"]
    print(
        f"| gepa | {chosen.seed} | {details['verdict']} | {shown} | {len(details['validation'])} prompts | "
        f"{budget['rollouts_begun']} rollouts | {budget['agent_tokens']:,} + {budget['reflection_tokens']:,} tokens | "
        f"{found['seconds']:.0f} s |"
    )


if __name__ == "__main__":
    main()
