"""Default settings learn: the three example policies without a learning rate of anybody's choosing, on the real vLLM.

    python -m benchmarks.default_rates [--examples email_search,math,planner] [--seed 1] [--rounds 40] [--rate RATE]
                                       [--python FILE] [--quick] [--json] [--folder DIR]

Each is `ratchet tune weights` with the example's own ratchet.yaml less its `learning_rate` (and `target_kl`), which are
then their defaults: `auto`. Rounds of 16 training tasks x 8 attempts; 40 rounds are twice the demo's rollouts. The test
tasks are tried before, half way and after; learnt is what has a 95% interval of the paired difference above zero.
`--quick` takes eight rounds and tries each test task once, before and after. `--rate` names a fixed rate instead, for
comparison. Exit code 1 where an example did not learn. `math` needs an environment with AgentScope (its README), by
`--python`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ratchet.store.states import RoundState
from ratchet.store.store import open_store
from ratchet.supervisor import signals
from tests.harness.ports import free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = ("email_search", "math", "planner")
_QUICK = 8  # rounds
_SHOWN = (
    "learning_rate",
    "approx_kl",
    "approx_kl_target",
    "logprob_change_abs_mean",
    "logprob_change_positive_mean",
    "entropy",
    "reward",
)


class DefaultRatesRun:
    """One example in a folder of its own."""

    def __init__(self, example: str, folder: Path, rate: float | None, python: str) -> None:
        self._example, self._folder, self._python = example, folder, python
        folder.mkdir(parents=True, exist_ok=True)
        self._environ = os.environ | {"RATCHET_STATE_DIR": str(folder / "state")}
        self._own: list[str] = []
        home = ROOT / ("ratchet/demo" if example == "email_search" else "examples") / example
        given: dict[str, Any] = yaml.safe_load((home / "ratchet.yaml").read_text())
        self._alias, self._project = given["model"], given["project"]
        given["vllm"]["port"], given["proxy"] = free_port(), {"port": free_port()}
        learner = given["learner"]
        for name in ("learning_rate", "target_kl"):
            learner.pop(name, None)
        if rate is not None:
            learner["learning_rate"] = rate
        self._config = folder / "ratchet.yaml"
        self._config.write_text(yaml.safe_dump(given))
        if example == "email_search":
            mail = str(folder / "mail")
            self._environ |= {"EMAIL_SEARCH_HOME": mail}
            made = [sys.executable, "-m", "ratchet.demo.email_search", "build-db", "--home", mail]
            subprocess.run(made, cwd=ROOT, env=self._environ, check=True, capture_output=True)
            self._own = ["--tasks", mail]

    def tuned(self, rounds: int, every: int, attempts: int, seed: int) -> Mapping[str, Any]:
        """Tune, and return what came of it."""
        words = [
            "--rounds",
            str(rounds),
            "--eval-every",
            str(every),
            "--eval-attempts",
            str(attempts),
            "--patience",
            "0",
        ]
        started = time.monotonic()
        try:
            self._ratchet(sys.executable, "up", "--detach").check_returncode()
            done = self._ratchet(self._python, "tune", "weights", "--json", *words, "--seed", str(seed), *self._own)
        finally:
            self._ratchet(sys.executable, "down")
        if done.returncode not in (0, 3):
            raise SystemExit(f"{self._example} ended with {done.returncode}")
        (self._folder / "result.json").write_text(done.stdout)
        return figures(self._example, json.loads(done.stdout), self._rounds(), time.monotonic() - started)

    def _ratchet(self, python: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "ratchet", "--config", str(self._config), *words]
        return subprocess.run(command, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, text=True, check=False)

    def _rounds(self) -> list[dict[str, float]]:
        store = open_store(str(self._folder / "state" / self._project / "store.db"), create=False)
        try:
            round_ = [one for one in store.rounds.page(self._alias, limit=1000) if one.state is RoundState.COMMITTED]
        finally:
            store.close()
        return [{name: one.metrics[name] for name in _SHOWN} for one in reversed(round_)]


def figures(
    example: str, result: Mapping[str, Any], rounds: Sequence[Mapping[str, float]], seconds: float
) -> dict[str, Any]:
    """Return what is printed of a run."""
    curve = [
        {name: one[name] for name in ("round", "version", "rollouts", "mean", "low", "high", "against_baseline")}
        for one in result["details"]["curve"]
    ]
    gain = result["gain"] or {}
    return {
        "example": example,
        "learned": gain.get("low", 0.0) > 0,
        "rollouts": curve[-1]["rollouts"],
        "curve": curve,
        "rounds": list(rounds),
        "seconds": seconds,
    }


def show(found: Mapping[str, Any]) -> None:
    """Print the curve and the rounds as tables in Markdown have them."""
    for one in found["curve"]:
        against = one["against_baseline"]
        gain = f"{against['difference']:+.3f} ({against['low']:+.3f} to {against['high']:+.3f})" if against else ""
        print(
            f"| {found['example']} | {one['rollouts']} | @{one['version']} | {one['mean']:.3f} ({one['low']:.3f} to "
            f"{one['high']:.3f}) | {gain} |"
        )
    for number, one in enumerate(found["rounds"], 1):
        print(f"  round {number}: " + ", ".join(f"{name} {one[name]:.3g}" for name in _SHOWN))
    print(
        f"{found['example']}: {'learned' if found['learned'] else 'NOT LEARNED'}, {found['seconds']:.0f} s", flush=True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.default_rates", description=__doc__)
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--eval-attempts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, help="a fixed learning rate instead of the default")
    parser.add_argument(
        "--python", default=sys.executable, help="of the tuner's command, such as AgentScope's for math"
    )
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} rounds, each test task once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args(arguments)
    signals.install_handlers()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="default-rates-"))
    rounds, every, attempts = chosen.rounds, max(1, chosen.rounds // 2), chosen.eval_attempts
    if chosen.quick:
        rounds, every, attempts = _QUICK, _QUICK, 1
    found = []
    for example in chosen.examples.split(","):
        run = DefaultRatesRun(example, folder / f"{example}-{chosen.seed}", chosen.rate, chosen.python)
        found.append(run.tuned(rounds, every, attempts, chosen.seed))
        if not chosen.json:
            show(found[-1])
    if chosen.json:
        print(json.dumps(found, indent=2))
    return int(not all(one["learned"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
