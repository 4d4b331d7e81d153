"""`ratchet tune weights` through its command on an example, on the real vLLM; killed by SIGKILL on the way, if asked.

    python -m benchmarks.tune_weights math|planner|email_search [--rounds 5] [--seed 1] [--kill-at N] [--python FILE]

The example's own ratchet.yaml, task set, workflow and judge; the project is started beside the command and stopped in
the end. `--python` runs the command in another environment (AgentScope's, for `math`). With `--kill-at N` the command
is killed once N rollouts of its training have ended, and goes on with `--resume`: what it made before must not be made
again, what was under way must be abandoned, and nothing of that may be trained.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recipes import show
from ratchet.store.operation_records import Rollout
from ratchet.store.states import RolloutState
from ratchet.store.store import Store, open_store
from ratchet.supervisor import signals
from ratchet.tuner.weights.weight_tuning import LIVE

ROOT = Path(__file__).parents[1]
_POLL = 0.2  # seconds


class WeightTuningRun:
    """One example in a state folder of its own."""

    def __init__(self, example: str, folder: Path, python: str) -> None:
        self._python = python
        self._config = ["-m", "ratchet", "--config", f"examples/{example}/ratchet.yaml"]
        self._environ = os.environ | {"RATCHET_STATE_DIR": str(folder / "state")}
        self._own: list[str] = []
        if example == "email_search":
            home = str(folder / "mail")
            self._environ |= {"EMAIL_SEARCH_HOME": home}
            made = [sys.executable, "-m", "ratchet.demo.email_search", "build-db", "--home", home]
            subprocess.run(made, cwd=ROOT, env=self._environ, check=True, capture_output=True)
            self._own = ["--tasks", home]
        (self.project,) = {line.split()[1] for line in (ROOT / self._config[-1]).read_text().splitlines()
                           if line.startswith("project:")}  # fmt: skip
        self.database = folder / "state" / self.project / "store.db"

    def ratchet(self, *words: str) -> None:
        """Run a command of the project, in this environment."""
        subprocess.run([sys.executable, *self._config, *words], cwd=ROOT, env=self._environ, check=True)

    def tune(self, *words: str) -> subprocess.Popen[str]:
        """Start the tuner's command."""
        command = [self._python, *self._config, "tune", "weights", "--json", *words]
        return subprocess.Popen(command, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, text=True)

    def begin(self, rounds: int, seed: int, attempts: int) -> subprocess.Popen[str]:
        """Start the run that is measured."""
        every = ["--rounds", str(rounds), "--eval-every", str(rounds), "--eval-attempts", str(attempts)]
        return self.tune(*every, "--patience", "0", "--seed", str(seed), *self._own)


def result_of(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    """Return what a run of the command found."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the command ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


def killed(run: WeightTuningRun, process: subprocess.Popen[str], store: Store, training: int) -> Mapping[str, Any]:
    """Kill the command after some training rollouts, resume it, and report what was lost."""
    while len(_ended(store, LIVE)) < training:
        if process.poll() is not None:
            raise SystemExit("the command ended before it could be killed")
        time.sleep(_POLL)
    process.kill()
    process.wait()
    (tuning,) = store.tunings.page("weights")
    before = {one.id for one in store.rollouts.of_tuning(tuning.id) if one.counts}
    started = time.monotonic()
    again = run.tune("--resume", tuning.id)
    while not (gone := _in_state(store, tuning.id, RolloutState.ABANDONED)):
        time.sleep(_POLL)
    waited = time.monotonic() - started
    found = result_of(again)
    _check(store, tuning.id, before)
    under_way = store.trajectories.last_active([one.id for one in gone])
    print(
        f"killed after {len(before)} rollouts, {len(gone)} abandoned, {len(under_way)} of them had called; the run was "
        f"taken over after {waited:.1f} s; none was made again, nothing abandoned was trained"
    )
    return found


def _ended(store: Store, candidate: str) -> list[Rollout]:
    return [
        one
        for tuning in store.tunings.page("weights")
        for one in store.rollouts.of_tuning(tuning.id, candidate)
        if one.counts
    ]


def _in_state(store: Store, tuning: str, state: RolloutState) -> list[Rollout]:
    return [one for one in store.rollouts.of_tuning(tuning) if one.state is state]


def _check(store: Store, tuning: str, before: set[str]) -> None:
    """Hold that no rollout was made twice, and that nothing learnt of what was cut off."""
    over = [one for one in store.rollouts.of_tuning(tuning) if one.counts]
    places = Counter((one.candidate, one.task_id, one.attempt, one.step) for one in over)
    assert before <= {one.id for one in over}
    assert max(places.values()) == 1, "a rollout that had ended was made again"
    for one in _in_state(store, tuning, RolloutState.ABANDONED):
        if store.trajectories.last_active([one.id]):
            found = store.trajectories.get(one.id)
            assert str(found.state) != "trained", f"{one.id} was cut off, and was trained"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_weights", description=__doc__)
    parser.add_argument("example", choices=["math", "planner", "email_search"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eval-attempts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-at", type=int, metavar="N")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args(arguments)
    signals.install_handlers()
    run = WeightTuningRun(
        chosen.example, chosen.folder or Path(tempfile.mkdtemp(prefix="tune-weights-")), chosen.python
    )
    started = time.monotonic()
    try:
        run.ratchet("up", "--detach")
        process = run.begin(chosen.rounds, chosen.seed, chosen.eval_attempts)
        if chosen.kill_at is None:
            found = result_of(process)
        else:
            store = open_store(str(run.database))
            found = killed(run, process, store, chosen.kill_at)
            store.close()
        show(chosen.example, found)
    finally:
        run.ratchet("down")
    print(f"{chosen.example}: {time.monotonic() - started:.0f} s with the project's start and end")


if __name__ == "__main__":
    main()
