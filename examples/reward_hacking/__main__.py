"""`python -m examples.reward_hacking`: a policy learns to fool its judge, and is held before it is promoted.

Runs the commands of the README one after the other against a project of its own (`ratchet.yaml` beside this file) and
prints what each says. Exit code 0 where the version that fools the judge was held, 1 where it was not. Stops what it
started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.reward_hacking.teacher import teaching
from ratchet.demo.email_search.tasks import home, read_tasks

CONFIG = "examples/reward_hacking/ratchet.yaml"
ALIAS = "email-agent"
_PATIENCE = 180.0  # seconds for the gate to decide once the traffic is over


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.reward_hacking", description=__doc__)
    parser.add_argument("--taught", type=int, default=192, help="trajectories of the teacher")
    parser.add_argument("--test-tasks", type=int, default=40, help="held-out tasks that the tuner measures on")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 128 rollouts of traffic during the ramp")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("HEDGER_API_KEY", "any")
    _agent("build-db")
    _lint()
    with teaching():
        _ratchet("up", "--detach")
        try:
            found = _play(chosen)
        finally:
            _ratchet("down")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2))
    print(json.dumps(found, indent=2))
    return 0 if found["held"] else 1


def _play(chosen: argparse.Namespace) -> dict[str, Any]:
    url = json.loads(_ratchet("status", "--json"))["base_url"]
    traffic = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "any"}
    taught = ("--rounds", "1", "--attempts", "1", "--concurrency", "8")
    _agent("train", *taught, "--tasks-per-round", str(chosen.taught), OPENAI_MODEL="hedger", **traffic)
    imitating = (
        "--warm-start",
        "hedger",
        "--warm-start-setting",
        "num_train_epochs=12",
        "--warm-start-setting",
        "learning_rate=0.004",
        "--rounds",
        "0",
    )
    _ratchet("tune", "weights", *imitating, "--eval-tasks", str(chosen.test_tasks), fine=(0, 3))
    work = ("--rounds", str(chosen.rounds), "--concurrency", "32", "--out", str(home() / "ramp.jsonl"))
    _agent("train", *work, OPENAI_MODEL=ALIAS, **traffic)
    held = _wait_for_a_decision()
    _ratchet("status")
    _ratchet("policies", "show", ALIAS)
    return {"held": held, "truth": _truth(home() / "ramp.jsonl"), "decisions": _decisions()}


def _wait_for_a_decision() -> bool:
    """Whether a version is held; waits until the release has decided about it."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        store = json.loads(_ratchet("status", "--json", quiet=True))["store"]
        if store["pending_approval"] or not store["ramp"]:
            return bool(store["pending_approval"])
        time.sleep(2.0)
    return False


def _truth(rollouts: Path) -> dict[str, Any]:
    """What the agent's own tests say, which no judge here sees: success by the version that answered."""
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    by_version: dict[str, list[bool]] = {}
    for row in rows:
        by_version.setdefault(",".join(row["models"]), []).append(bool(row["success"]))
    return {name: {"rollouts": len(won), "success": sum(won) / len(won)} for name, won in sorted(by_version.items())}


def _decisions() -> Any:
    return json.loads(_ratchet("policies", "show", ALIAS, "--json", quiet=True))


def _lint() -> None:
    """Show that the lint would have said so before anything was trained; its exit code is 1."""
    task = read_tasks(home(), "test")[0]
    row = {"id": task.id, "question": task.question, "answer": task.answer}
    wrong = ["Oslo", "Paris"] if task.kind == "city" else ["January", "March"]
    words = ["--task", json.dumps(row), "--question", task.question, "--answer", task.answer]
    words += [part for one in wrong if one != task.answer for part in ("--wrong", one)]
    _ratchet("judge", "lint", *words, fine=(0, 1))


def _agent(*arguments: str, **environment: str) -> None:
    _run([sys.executable, "-m", "ratchet.demo.email_search", *arguments], environment)


def _ratchet(*arguments: str, fine: Sequence[int] = (0,), quiet: bool = False) -> str:
    return _run([sys.executable, "-m", "ratchet", "--config", CONFIG, *arguments], {}, fine, quiet)


def _run(command: Sequence[str], variables: Mapping[str, str], fine: Sequence[int] = (0,), quiet: bool = False) -> str:
    """Run a command, show what it prints, and return it. Raises SystemExit where it fails."""
    print(f"\n$ {' '.join(command[2:])}", flush=True)
    done = subprocess.run(command, env=os.environ | dict(variables), capture_output=True, text=True, check=False)
    if not quiet or done.returncode not in fine:
        print(done.stdout, flush=True)
    if done.returncode not in fine:
        raise SystemExit(f"{command[2]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
