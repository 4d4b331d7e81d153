"""Recipes: `rl from base` and `sft -> rl` on the e-mail example, on the real vLLM, with as many training rollouts each.

    python -m benchmarks.recipes [--recipes base,sft] [--rounds 16] [--seed 1] [--folder DIR]

Each is a run of `ratchet tune weights` in a project of its own: the same test tasks (150, twice each), evaluated every
fourth round. `sft` spends four of the rounds on trajectories that are only imitated; its general data is the mixture
of good and failed episodes that the tiny policy was made with, from mailboxes that it has never seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.email_search.demonstrations import MIXED, EpisodeMailbox, draw
from ratchet.demo.email_search.agent import TOOLS
from ratchet.supervisor import signals

CONFIG = "ratchet/demo/email_search/ratchet.yaml"
WORKFLOW = "ratchet.demo.email_search.agent:workflow"
_GENERAL = 300  # conversations
_COLLECTED = 4  # rounds


def write_general(file: Path) -> None:
    """Write the general conversations."""
    dice = random.Random(3)
    stages = [EpisodeMailbox.made(700 + number) for number in range(3)]
    lines: list[str] = []
    while len(lines) < _GENERAL:
        result = draw(stages, dice, MIXED)
        while result and result[-1]["role"] != "assistant":
            result = result[:-1]
        if len(result) > 2:
            lines.append(json.dumps({"messages": result, "tools": list(TOOLS)}))
    file.write_text("\n".join(lines))


def tuned(name: str, folder: Path, seed: int, rounds: int) -> Mapping[str, Any]:
    """Run one recipe; return its result."""
    own = ["--rounds", str(rounds)]
    if name == "sft":
        general = folder / "general.jsonl"
        write_general(general)
        own = ["--rounds", str(rounds - _COLLECTED), "--collect", str(_COLLECTED), "--warm-start", "policy"]
        own += [
            "--warm-start-setting",
            f"general={general}",
            "--warm-start-setting",
            "learning_rate=1.0e-3",
            "--warm-start-setting",
            "num_train_epochs=3",
        ]
    home = str(folder / "home")
    command = [sys.executable, "-m", "ratchet", "--config", CONFIG, "tune", "weights", "--project", f"{name}-{seed}"]
    command += ["--tasks", home, "--workflow", WORKFLOW, "--concurrency", "32", "--eval-attempts", "2"]
    command += ["--eval-every", "4", "--patience", "0", "--seed", str(seed), "--json"]
    command += ["--png", str(folder / f"{name}-{seed}.png"), *own]
    environment = os.environ | {"EMAIL_SEARCH_HOME": home, "RATCHET_STATE_DIR": str(folder / "state")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{name} ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    (folder / f"{name}-{seed}.json").write_text(done.stdout)
    return result


def show(name: str, result: Mapping[str, Any]) -> None:
    """Print one line for each evaluation, as a table in Markdown has them, and the gain."""
    for one in result["details"]["curve"]:
        print(
            f"| {name} | {one['round']} | {one['rollouts']} | {one['version']} | {one['mean']:.3f} "
            f"({one['low']:.3f} to {one['high']:.3f}) |"
        )
    gain = result["gain"]
    if gain is not None:
        print(f"{name}: {gain['difference']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f}) on {gain['tasks']} tasks")
    if (story := result["details"]["warm_start"]) is not None:
        kept = ("trajectories", "skipped", "general_loss_before", "general_loss_after", "loss_by_epoch")
        print(f"{name}: warm start {json.dumps({key: story[key] for key in kept})}")
    print(f"{name}: {result['spent']['rollouts']} rollouts, {result['wall_seconds']:.0f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--recipes", default="base,sft")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    signals.install_handlers()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="recipes-"))
    home = os.environ | {"EMAIL_SEARCH_HOME": str(folder / "home")}
    subprocess.run([sys.executable, "-m", "ratchet.demo.email_search", "build-db"], env=home, check=True)
    for name in chosen.recipes.split(","):
        show(name, tuned(name, folder, chosen.seed, chosen.rounds))


if __name__ == "__main__":
    main()
