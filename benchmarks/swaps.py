"""Swaps that nobody notices: a hundred new versions under load, through the publisher as the trainer uses it.

A real proxy and a scripted vLLM (`benchmarks/scripted_learner.py`) in processes of their own, or with `--vllm real`
vLLM itself with the tiny policy and adapters of a real learner; agents of several calls each, half of them streamed.
In turns no version changes for a while, and then one after the other is loaded, proven and made live while old ones
are drained and unloaded. Every answer says which version spoke.

    python -m benchmarks.swaps [--vllm scripted|real] [--swaps 100] [--pause 0.2] [--steady 30] [--agents 8] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx

from benchmarks.scripted_learner import ScriptedLearner
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.vllm_api import Replica
from ratchet.trainer.release.publisher import Publisher
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.servers import ProxyProcess, eventually, scripted_process

ALIAS = "agent"
_CALLS = 3  # of one agent's run
_IN_A_ROW = 5  # swaps between two times without any
_PROBES = [tuple(range(3, end)) for end in range(5, 21)]
_SETTINGS = TrainerSettings(
    store="unused",
    model=ALIAS,
    base_model="scripted",
    vllm=("http://unused",),
    checkpoints=Path(),
    judge="unused:unused",
)


@dataclass
class Outcome:
    """What came of it; times in milliseconds."""

    swaps: int = 0
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    mixed_answers: int = 0  # answers whose chunks name more than one version
    mixed_runs: int = 0  # runs that more than one version answered
    versions_seen: int = 0
    steady_p50: float = 0.0
    steady_p99: float = 0.0
    swapping_p50: float = 0.0
    swapping_p99: float = 0.0
    swap_p50: float = 0.0  # of load, proof and promotion
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """How much worse the slowest hundredth is while versions change."""
        return self.swapping_p99 / self.steady_p99


class Agents:
    """Clients in a thread; each call is noted with its latency and whether versions were changing."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self._count = count
        self.swapping = False
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.failed: list[str] = []
        self.mixed_answers = self.mixed_runs = 0
        self.seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; calls under way are waited for."""
        self._stop.set()
        self._thread.join(60)

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            await asyncio.gather(*(self._agent(session, random.Random(seed)) for seed in range(self._count)))

    async def _agent(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        while not self._stop.is_set():
            name, seen = f"run-{dice.getrandbits(96):x}", set()
            messages: list[dict[str, Any]] = []
            for number in range(_CALLS):
                messages.append({"role": "user", "content": f"{name} {number} #tokens=20 #delay=0.004"})
                try:
                    words, models = await self._call(session, name, messages, streamed=dice.random() < 0.5)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    self.failed.append(f"{type(error).__name__}: {error}"[:200])
                    break
                self.mixed_answers += len(models) > 1
                seen |= models
                messages.append({"role": "assistant", "content": words})
            self.mixed_runs += len(seen) > 1
            self.seen |= seen

    async def _call(
        self, session: aiohttp.ClientSession, name: str, messages: Sequence[dict[str, Any]], streamed: bool
    ) -> tuple[str, set[str]]:
        body = {"model": ALIAS, "messages": messages, "stream": streamed, "max_tokens": 20}
        swapping, began = self.swapping, time.perf_counter()
        headers = {"x-ratchet-trajectory": name}
        async with session.post(self.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
        if swapping == self.swapping:
            self.times[swapping].append(1000 * (time.perf_counter() - began))
        if answer.status != 200:
            raise ValueError(f"{answer.status} {text}")
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        whole = events if streamed else [json.loads(text)]
        if streamed and (not text.endswith("data: [DONE]\n\n") or any("error" in event for event in events)):
            raise ValueError(f"a stream broke off: {text[-200:]}")
        parts = [choice.get("message") or choice["delta"] for event in whole for choice in event["choices"]]
        return "".join(part.get("content") or "" for part in parts), {event["model"] for event in whole}


class SwapScorer(Protocol):
    """What makes the versions."""

    def learn(self, names: Sequence[str]) -> None: ...

    def save(self, folder: Path) -> None: ...

    def score(self, rows: Sequence[Sequence[int]], *, adapter: bool | Path = True) -> list[tuple[float, ...]]: ...


@contextmanager
def _served(real: bool, folder: Path) -> Iterator[tuple[str, SwapScorer]]:
    """The URL of a vLLM, and what makes versions for it."""
    if not real:
        with scripted_process("benchmarks.scripted_learner", "vllm") as url:
            yield url, ScriptedLearner(_SETTINGS, None)
        return
    from benchmarks.real_versions import POLICY, RealPupil
    from tests.harness.vllm.engine import vllm

    with vllm(POLICY, folder / "vllm.log", "--dtype", "float32", max_model_len=1024) as url:
        yield url, RealPupil(folder)


def swap(store: Store, publisher: Publisher, pupil: SwapScorer, folder: Path) -> None:
    """Make a version as a round would, and publish it."""
    version = store.rounds.next_version(ALIAS)
    pupil.learn([f"trajectory-{version}"])
    pupil.save(folder / f"{version:04d}")
    held = store.rounds.start(ALIAS, version - 1)
    path = str(folder / f"{version:04d}")
    candidate = store.rounds.commit(held.id, version=version, checkpoint=path, groups=[], metrics={})
    assert publisher.publish(candidate, _PROBES, pupil), "the swap was refused"
    publisher.drain(time.time())


def run(folder: Path, swaps: int, pause: float, steady: float, agents: int = 8, real: bool = False) -> Outcome:
    """Run it in an empty folder."""
    outcome, began = Outcome(swaps=swaps), time.perf_counter()
    with _served(real, folder) as (vllm, pupil):
        proxy = ProxyProcess(folder, upstreams=[vllm])
        eventually(lambda: httpx.get(proxy.url + "/health/ready", timeout=5).status_code == 200, 30)
        store, replica = open_store(str(folder / "store.db")), Replica(vllm)
        publisher = Publisher(store, [replica], alias=ALIAS, tolerance=0.01, keep_loaded_adapters=2)
        traffic, took = Agents(proxy.url, agents), []
        try:
            for number in range(swaps):
                if number % _IN_A_ROW == 0:  # in turns, so that whatever else the machine does slows both
                    traffic.swapping = False
                    time.sleep(steady * _IN_A_ROW / swaps)
                    traffic.swapping = True
                time.sleep(pause)
                started = time.perf_counter()
                swap(store, publisher, pupil, folder / "checkpoints")
                took.append(1000 * (time.perf_counter() - started))
        finally:
            traffic.stop()
            replica.close()
            store.close()
            proxy.stop()
    outcome.seconds = time.perf_counter() - began
    return _filled(outcome, traffic, took)


def _filled(outcome: Outcome, agents: Agents, took: Sequence[float]) -> Outcome:
    outcome.calls = sum(map(len, agents.times.values()))
    outcome.failed = agents.failed
    outcome.mixed_answers, outcome.mixed_runs = agents.mixed_answers, agents.mixed_runs
    outcome.versions_seen = len(agents.seen)
    outcome.steady_p50, outcome.steady_p99 = _quantile(agents.times[False], 0.5), _quantile(agents.times[False], 0.99)
    outcome.swapping_p50 = _quantile(agents.times[True], 0.5)
    outcome.swapping_p99 = _quantile(agents.times[True], 0.99)
    outcome.swap_p50 = _quantile(took, 0.5)
    return outcome


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    """Print the figures; fail where a call failed or two versions were mixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", choices=("scripted", "real"), default="scripted")
    parser.add_argument("--agents", type=int, default=8, help="at work at the same time")
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two swaps")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds without swaps, in all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(
            Path(folder), options.swaps, options.pause, options.steady, options.agents, options.vllm == "real"
        )
    if options.json:
        print(json.dumps(asdict(outcome) | {"ratio": outcome.ratio}))
    else:
        for name, value in asdict(outcome).items():
            print(f"{name:14} {value:.1f}" if isinstance(value, float) else f"{name:14} {value}")
        print(f"p99 while versions change, over p99 while none does: {outcome.ratio:.2f}")
    sys.exit(bool(outcome.failed or outcome.mixed_answers or outcome.mixed_runs))


if __name__ == "__main__":
    main()
