"""The swap campaign: adapter versions are swapped under load, through the trainer's release.

A real proxy and a scripted vLLM run in processes of their own. Agents make several calls per trajectory, half of them
streamed. Periods without swaps alternate with periods in which version after version is loaded, proven and promoted
while older ones are drained and unloaded. Every answer names the version that produced it.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx

from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.release.release import PublishResult, Release
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.servers import ProxyProcess, eventually, scripted_process
from tests.harness.trainer.releases import make_release
from tests.harness.trainer.scripted_learner import ScriptedLearner

ALIAS = "agent"
_CALLS = 3  # per trajectory
_SWAPS_PER_PERIOD = 5  # between two periods without swaps
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
class SwapOutcome:
    """Counts and latencies of a campaign. Latencies are milliseconds."""

    swaps: int = 0
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    mixed_answers: int = 0  # answers whose chunks name more than one version
    mixed_trajectories: int = 0  # trajectories answered by more than one version
    versions_seen: int = 0
    steady_p50: float = 0.0
    steady_p99: float = 0.0
    swapping_p50: float = 0.0
    swapping_p99: float = 0.0
    swap_p50: float = 0.0  # of load, proof and promotion
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """p99 latency while versions are swapped, divided by p99 without swaps."""
        return self.swapping_p99 / self.steady_p99


class SwapTraffic:
    """Agents on an event loop in a thread; latencies are recorded separately with and without swaps."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self._count = count
        self.swapping = False
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.failed: list[str] = []
        self.mixed_answers = self.mixed_trajectories = 0
        self.seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the calls in progress."""
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
            self.mixed_trajectories += len(seen) > 1
            self.seen |= seen

    async def _call(
        self, session: aiohttp.ClientSession, name: str, messages: Sequence[dict[str, Any]], streamed: bool
    ) -> tuple[str, set[str]]:
        body = {"model": ALIAS, "messages": messages, "stream": streamed, "max_tokens": 20}
        swapping, started = self.swapping, time.perf_counter()
        headers = {"x-ratchet-trajectory": name}
        async with session.post(self.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
        if swapping == self.swapping:
            self.times[swapping].append(1000 * (time.perf_counter() - started))
        if answer.status != 200:
            raise ValueError(f"{answer.status} {text}")
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        whole = events if streamed else [json.loads(text)]
        if streamed and (not text.endswith("data: [DONE]\n\n") or any("error" in event for event in events)):
            raise ValueError(f"incomplete stream: {text[-200:]}")
        parts = [choice.get("message") or choice["delta"] for event in whole for choice in event["choices"]]
        return "".join(part.get("content") or "" for part in parts), {event["model"] for event in whole}


class VersionMaker(Protocol):
    """A learner that makes and scores versions."""

    def learn(self, names: Sequence[str]) -> None: ...

    def save(self, folder: Path) -> None: ...

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]: ...


@contextmanager
def scripted(folder: Path) -> Iterator[tuple[str, VersionMaker]]:
    """Yield the URL of a scripted vLLM and a scripted learner. `folder` is not used."""
    with scripted_process("tests.harness.trainer.scripted_processes", "vllm") as url:
        yield url, ScriptedLearner(_SETTINGS, None)


Serve = Callable[[Path], AbstractContextManager[tuple[str, VersionMaker]]]


def swap(store: Store, release: Release, maker: VersionMaker, folder: Path) -> None:
    """Make a version as a training round does, and publish it."""
    version = store.rounds.next_version(ALIAS)
    maker.learn([f"trajectory-{version}"])
    maker.save(folder / f"{version:04d}")
    round_ = store.rounds.start(ALIAS, version - 1)
    path = str(folder / f"{version:04d}")
    candidate = store.rounds.commit(round_.id, version=version, checkpoint=path, groups=[], metrics={})
    assert release.publish(candidate, _PROBES, maker) is PublishResult.RELEASED, "the swap was refused"
    release.drain(time.time())


def run(folder: Path, swaps: int, pause: float, steady: float, agents: int = 8, serve: Serve = scripted) -> SwapOutcome:
    """Run a campaign in an empty folder. `serve` starts the vLLM."""
    outcome, started = SwapOutcome(swaps=swaps), time.perf_counter()
    with serve(folder) as (vllm, maker):
        proxy = ProxyProcess(folder, upstreams=[vllm])
        eventually(lambda: httpx.get(proxy.url + "/health/ready", timeout=60).status_code == 200)
        store, replica = open_store(str(folder / "store.db")), VllmServer(vllm)
        release = make_release(store, [replica], ALIAS, proof_tolerance=0.01, keep_loaded_adapters=2)
        traffic, durations = SwapTraffic(proxy.url, agents), []
        try:
            for number in range(swaps):
                if number % _SWAPS_PER_PERIOD == 0:  # alternate: other load on the machine then slows both
                    traffic.swapping = False
                    time.sleep(steady * _SWAPS_PER_PERIOD / swaps)
                    traffic.swapping = True
                time.sleep(pause)
                before = time.perf_counter()
                swap(store, release, maker, folder / "checkpoints")
                durations.append(1000 * (time.perf_counter() - before))
        finally:
            traffic.stop()
            replica.close()
            store.close()
            proxy.stop()
    outcome.seconds = time.perf_counter() - started
    return _filled(outcome, traffic, durations)


def _filled(outcome: SwapOutcome, agents: SwapTraffic, durations: Sequence[float]) -> SwapOutcome:
    outcome.calls = sum(map(len, agents.times.values()))
    outcome.failed = agents.failed
    outcome.mixed_answers = agents.mixed_answers
    outcome.mixed_trajectories = agents.mixed_trajectories
    outcome.versions_seen = len(agents.seen)
    outcome.steady_p50, outcome.steady_p99 = _quantile(agents.times[False], 0.5), _quantile(agents.times[False], 0.99)
    outcome.swapping_p50 = _quantile(agents.times[True], 0.5)
    outcome.swapping_p99 = _quantile(agents.times[True], 0.99)
    outcome.swap_p50 = _quantile(durations, 0.5)
    return outcome


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
