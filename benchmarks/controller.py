"""The controller process under the traffic of many agents: memory, CPU share, and how soon it acts.

Agents' trajectories are written to a real store while one real controller process serves all agents, with a scripted
learner (0.1 s per round), a judge function and a scripted vLLM. Latencies are read from the store: a round's start less
its newest verdict, and a version's release less that verdict.

python -m benchmarks.controller [--agents 20] [--per-minute 100] [--seconds 180] [--store sqlite|postgresql]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import msgspec
import psutil

from ratchet.store.states import PolicyAction, RoundState
from ratchet.store.store import Store, open_store
from tests.harness.exactly_once.processes import RestartableProcess
from tests.harness.ports import free_port
from tests.harness.postgres import postgres
from tests.harness.proxy.servers import eventually
from tests.harness.records import call_start, ended

BASE = "tiny-base"  # what the scripted vLLM serves
GENERATIONS, GROUPS = 4, 2  # attempts at a task, tasks in a round
_WARM_UP = 30.0  # seconds before the measurement: the start, and the first trajectories that are complete


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run shows. Latencies are in seconds."""

    agents: int
    trajectories: int
    rounds: int
    rss_mb: float
    cpu_share: float
    round_after_verdict: list[float]
    release_after_verdict: list[float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--per-minute", type=float, default=100.0, help="trajectories of all agents")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, _database(options.store, Path(temporary)) as url:
        measured = run(Path(temporary), url, options.agents, options.per_minute, options.seconds)
    print(f"store {options.store}, {measured.agents} agents, {options.per_minute:g} trajectories a minute")
    print(f"  trajectories {measured.trajectories}, rounds {measured.rounds}")
    print(f"  memory {measured.rss_mb:.0f} MB, CPU {100 * measured.cpu_share:.1f}% of a core")
    print(f"  last verdict to the round's start: {_describe(measured.round_after_verdict)}")
    print(f"  last verdict to the release: {_describe(measured.release_after_verdict)}")


def run(folder: Path, url: str, agents: int, per_minute: float, seconds: float) -> Measured:
    """Run the traffic through the controller process and measure it after a warm-up."""
    store, port = open_store(url), free_port()
    names = [f"agent{number:02d}" for number in range(agents)]
    for name in names:
        store.policies.register_base(name, BASE)
    vllm = RestartableProcess("vllm", str(port), folder / "vllm.log")
    eventually(lambda: _answers(port), 30)
    settings = json.dumps([_settings(folder, url, name, port) for name in names])
    controller = RestartableProcess("trainer", settings, folder / "controller.log")
    try:
        process, numbers = psutil.Process(controller.process.pid), count()
        _send(store, names, per_minute, _WARM_UP, numbers)
        before, started, began = process.cpu_times(), time.monotonic(), time.time()
        _send(store, names, per_minute, seconds, numbers)
        after, elapsed = process.cpu_times(), time.monotonic() - started
        used = after.user + after.system - before.user - before.system
        rss = process.memory_info().rss / 1e6
        return _measured(store, names, began, next(numbers), rss, used / elapsed)
    finally:
        controller.kill()
        vllm.kill()
        store.close()


def _settings(folder: Path, url: str, name: str, port: int) -> dict[str, Any]:
    return {
        "store": url, "model": name, "base_model": "scripted", "vllm": [f"http://127.0.0.1:{port}"],
        "checkpoints": str(folder / name / "checkpoints"), "judge": "benchmarks.controller:judge",
        "release": {"policy": "immediate"},
        "seal_after_idle_seconds": 5.0, "num_generations": GENERATIONS, "groups_per_round": GROUPS,
    }  # fmt: skip


def judge(trajectory: dict[str, Any]) -> float:
    """Score the attempts at a task differently."""
    return float(str(trajectory["id"])[-1])


def _send(store: Store, names: Sequence[str], per_minute: float, seconds: float, numbers: Iterator[int]) -> None:
    """Store attempts at one task after the other, each task of the next agent, evenly over the time."""
    ends, due = time.monotonic() + seconds, time.monotonic()
    while due < ends:
        time.sleep(max(0.0, due - time.monotonic()))
        number = next(numbers)
        alias = names[number // GENERATIONS % len(names)]
        _ship(store, alias, f"task{number // GENERATIONS}", f"trj_{number // GENERATIONS:06d}_{number % GENERATIONS}")
        due += 60.0 / per_minute


def _ship(store: Store, alias: str, task: str, name: str) -> None:
    live = store.policies.live()[alias].version
    start = call_start(f"call_{name}", name, task=task, alias=alias, version=live, at=time.time())
    answer = ended(start, {"role": "assistant", "content": name}, prompt=(5,) * 500, ids=(6,) * 100)
    store.calls.ship([msgspec.structs.replace(answer, ended_at=start.started_at)])


def _measured(
    store: Store, names: Sequence[str], began: float, trajectories: int, rss: float, share: float
) -> Measured:
    rounds, to_round, to_release = 0, [], []
    for name in names:
        released = {
            one.version: one.decided_at
            for one in store.decisions.decisions_of(name, limit=1000)
            if one.action is PolicyAction.PROMOTE
        }
        for one in store.rounds.page(name, limit=1000):
            if one.started_at < began or one.state is not RoundState.COMMITTED:
                continue
            rounds += 1
            trained = store.trajectories.trained_in_round(one.id)
            last = max(verdict.judged_at for verdict in store.groups.verdicts(trained).values())
            to_round.append(one.started_at - last)
            if one.to_version in released:
                to_release.append(released[one.to_version] - last)
    return Measured(len(names), trajectories, rounds, rss, share, to_round, to_release)


def _describe(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values}"
    return f"median {median(values):.2f} s, 95% below {quantiles(values, n=20)[-1]:.2f} s, n={len(values)}"


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield str(folder / "store.db")
        return
    with postgres() as url:
        yield url


if __name__ == "__main__":
    main()
