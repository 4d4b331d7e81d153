"""Three agents on one base model, one vLLM and one learner, beside three projects of one agent each. Real vLLM.

    python -m benchmarks.several_agents [--rounds 6] [--seed 1] [--part PART]... [--folder DIR] [--json]

The agents are the demo's e-mail agent three times, each with its own loss settings and its own order of training tasks;
a fourth agent has a judge that always fails and gets a call a second. `ratchet tune weights --model NAME` runs for the
three at once. The separate projects run the same three tunings one after the other, as one machine without shared
learners has to. The parts are `shared` and the name of each agent, on its own: each writes its result into the folder,
a part that has one is not run again, and what is printed is of all results there are. Printed for both: each agent's
gain on held-out tasks (95% interval, paired by task), the elapsed time from the first rollout to the last result, peak
memory of the processes by role (proportional set size, so that shared pages count once; for the separate projects the
sum, as if they ran at once), and for the shared learner the seconds of training that each agent got and its longest
wait. Exit code 1 if an agent did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from ratchet.store.states import RoundState
from ratchet.store.store import open_store
from ratchet.supervisor import signals
from tests.harness.ports import free_port

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "ratchet" / "demo" / "email_search" / "ratchet.yaml"
AGENTS: dict[str, dict[str, Any]] = {
    "mail-dapo": {"loss_type": "dapo"},
    "mail-cispo": {"loss_type": "cispo"},
    "mail-grpo": {"loss_type": "grpo"},
}
SHARED = "shared"
PARTS = (SHARED, *AGENTS)
BROKEN = "mail-broken"
_JUDGE = "ratchet.demo.email_search.tasks:judge"
_BROKEN_JUDGE = "def judge(trajectory):\n    raise RuntimeError('this judge always fails')\n"
_ROLES = {"api_server": "vllm", " proxy": "proxy", " learner": "learner", " trainer": "trainer"}
_SAMPLE_SECONDS = 1.0


class PeakMemory:
    """The peak proportional set size, in MB, of a project's processes by role, sampled in a thread."""

    def __init__(self, config: Path) -> None:
        self._config = str(config)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peaks: dict[str, float] = defaultdict(float)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            now: dict[str, float] = defaultdict(float)
            for process in psutil.Process().children(recursive=True) + _of_project(self._config):
                try:
                    role = _role(" ".join(process.cmdline()))
                    if role:
                        now[role] += process.memory_full_info().pss / 2**20
                except psutil.Error:
                    continue
            now["all"] = sum(now.values())
            for role, size in now.items():
                self.peaks[role] = max(self.peaks[role], size)


def _role(command: str) -> str | None:
    return next((role for part, role in _ROLES.items() if part in command), None)


def _of_project(config: str) -> list[psutil.Process]:
    """Return the processes that `up --detach` left running for a project, with their children."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        if config in " ".join(process.info["cmdline"] or ()):
            for one in (process, *process.children(recursive=True)):
                found[one.pid] = one
    return list(found.values())


class AgentsRun:
    """A project with some of the agents, in a folder of its own."""

    def __init__(self, folder: Path, agents: Mapping[str, Mapping[str, Any]], *, broken: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._agents = folder, tuple(agents)
        mail = str(folder / "mail")
        (folder / "broken_judge.py").write_text(_BROKEN_JUDGE)
        self._environ = os.environ | {
            "RATCHET_STATE_DIR": str(folder / "state"),
            "EMAIL_SEARCH_HOME": mail,
            "PYTHONPATH": str(folder),
        }
        given: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        del given["model"]
        given["project"] = folder.name
        given["vllm"]["port"], given["proxy"] = free_port(), {"port": free_port()}
        self._url, self._broken = f"http://127.0.0.1:{given['proxy']['port']}/v1", broken
        given["tuner"]["tasks"] = mail
        del given["trainer"]["judge"]
        given["agents"] = {name: {"judge": _JUDGE, "learner": dict(own)} for name, own in agents.items()}
        if broken:
            given["agents"][BROKEN] = {"judge": "broken_judge:judge"}
        self._config = folder / "ratchet.yaml"
        self._config.write_text(yaml.safe_dump(given))
        made = [sys.executable, "-m", "ratchet.demo.email_search", "build-db", "--home", mail]
        subprocess.run(made, cwd=ROOT, env=self._environ, check=True, capture_output=True)

    def measure(self, rounds: int, seed: int) -> dict[str, Any]:
        """Tune all agents of the project at once; return what came of it."""
        try:
            self._ratchet("up", "--detach").check_returncode()
            started = time.monotonic()
            with self._calls(), PeakMemory(self._config) as memory, ThreadPoolExecutor(len(self._agents)) as pool:
                tunings = {
                    name: pool.submit(self._tune, name, rounds, seed + place) for place, name in enumerate(self._agents)
                }
                found = {name: tuning.result() for name, tuning in tunings.items()}
            seconds = time.monotonic() - started
        finally:
            self._ratchet("down")
        return {"agents": found, "seconds": seconds, "memory_mb": dict(memory.peaks), "turns": self._turns()}

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Send a call a second to the agent with the broken judge, if there is one."""
        stop = threading.Event()
        body = {"model": BROKEN, "messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 8}

        def call() -> None:
            with httpx.Client(base_url=self._url, timeout=60) as client:
                while not stop.wait(1.0):
                    client.post("/chat/completions", json=body)

        thread = threading.Thread(target=call)
        if self._broken:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if self._broken:
                thread.join()

    def _tune(self, name: str, rounds: int, seed: int) -> dict[str, Any]:
        words = [
            "--model", name, "--rounds", str(rounds), "--eval-every", str(rounds), "--eval-attempts", "1",
            "--patience", "0", "--seed", str(seed),
        ]  # fmt: skip
        done = self._ratchet("tune", "weights", "--json", *words)
        (self._folder / f"{name}.json").write_text(done.stdout)
        if done.returncode not in (0, 3):
            raise SystemExit(f"tuning {name} ended with {done.returncode}")
        tested = json.loads(done.stdout)["details"]["test"]
        return {"before": tested[0]["mean"], "after": tested[-1]["mean"], "gain": tested[-1]["against_baseline"]}

    def _ratchet(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet", "--config", str(self._config), *words]
        return subprocess.run(command, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, text=True, check=False)

    def _turns(self) -> dict[str, dict[str, float]]:
        """Return the number of committed rounds and the seconds of training of each agent."""
        store = open_store(str(self._folder / "state" / self._folder.name / "store.db"), create=False)
        try:
            rounds = {name: store.rounds.page(name, limit=1000) for name in self._agents}
        finally:
            store.close()
        committed = {
            name: [one for one in found if one.state is RoundState.COMMITTED] for name, found in rounds.items()
        }
        return {
            name: {"rounds": len(found), "train_seconds": sum(one.metrics["seconds"] for one in found)}
            for name, found in committed.items()
        }


def run_part(part: str, folder: Path, rounds: int, seed: int) -> None:
    """Run a part, unless its result is in the folder."""
    result = folder / f"{part}.json"
    if result.exists():
        return
    shutil.rmtree(folder / part, ignore_errors=True)  # of a run that was cut off
    if part == SHARED:
        found = AgentsRun(folder / part, AGENTS, broken=True).measure(rounds, seed)
    else:
        place = list(AGENTS).index(part)
        found = AgentsRun(folder / part, {part: AGENTS[part]}, broken=False).measure(rounds, seed + place)
    result.write_text(json.dumps(found))


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the parts have found; of the separate projects the sum of time and memory, if all have run."""
    found = {part: json.loads(file.read_text()) for part in PARTS if (file := folder / f"{part}.json").exists()}
    parts = {"one learner": found[SHARED]} if SHARED in found else {}
    runs = {name: found[name] for name in AGENTS if name in found}
    if not runs:
        return parts
    roles = {role for run in runs.values() for role in run["memory_mb"]}
    what = "separate trainers" if len(runs) == len(AGENTS) else f"{len(runs)} of {len(AGENTS)} separate trainers"
    return parts | {
        what: {
            "agents": {name: run["agents"][name] for name, run in runs.items()},
            "seconds": sum(run["seconds"] for run in runs.values()),
            "memory_mb": {role: sum(run["memory_mb"].get(role, 0.0) for run in runs.values()) for role in roles},
            "turns": {name: run["turns"][name] for name, run in runs.items()},
        }
    }


def show(what: str, found: Mapping[str, Any]) -> None:
    """Print one arrangement as rows of a table in Markdown."""
    for name, one in found["agents"].items():
        gain = one["gain"]
        print(
            f"| {what} | {name} | {one['before']:.3f} | {one['after']:.3f} | {gain['difference']:+.3f} "
            f"({gain['low']:+.3f} to {gain['high']:+.3f}) |"
        )
    memory = ", ".join(f"{role} {size:.0f} MB" for role, size in sorted(found["memory_mb"].items()))
    print(f"{what}: {found['seconds']:.0f} s; peak memory: {memory}")
    for name, turn in found.get("turns", {}).items():
        print(f"  {name}: {turn['rounds']} rounds, {turn['train_seconds']:.1f} s of training")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_agents", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", action="append", choices=PARTS, help="what to run; may be repeated; default: all")
    parser.add_argument("--folder", type=Path, help="keeps the results; the same one with the next part")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    signals.install_handlers()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="several-agents-"))
    folder.mkdir(parents=True, exist_ok=True)
    for part in chosen.part or PARTS:
        run_part(part, folder, chosen.rounds, chosen.seed)
    found = results(folder)
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        for what, one in found.items():
            show(what, one)
    return int(not all(one["gain"]["low"] > 0 for run in found.values() for one in run["agents"].values()))


if __name__ == "__main__":
    sys.exit(main())
