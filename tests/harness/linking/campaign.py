"""The linking campaign: agent traffic without ids through a real proxy, scored against the true trajectories.

Many concurrent agents with equal prompts, sub-agents, retries, disconnects, compaction, edits, several choices, every
way of sending an answer back, every dialect, and proxy restarts in between. `score.py` defines the metrics, `kinds.py`
and `dialects.py` the traffic.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from ratchet.store.records import Call
from ratchet.store.store import open_store
from tests.harness.linking.dialects import DIALECT_KINDS
from tests.harness.linking.kinds import KINDS, TrafficKind
from tests.harness.linking.score import LinkingScore, StoredCall, score_kinds
from tests.harness.linking.traffic import AgentRun, LinkingTraffic
from tests.harness.postgres import postgres_server
from tests.harness.proxy.machines import has_shipped, is_ready, start_machines
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served

MIN_SHARE = 0.999
_QUICK_DIVISOR = 8  # --quick runs this fraction of the agents


@dataclass
class LinkingResult:
    """The score of one kind of traffic. `evidence`: the traffic contains enough evidence to require recall."""

    score: LinkingScore
    evidence: bool

    @property
    def good(self) -> bool:
        """Whether every required metric reaches MIN_SHARE."""
        found = self.score.precision >= MIN_SHARE and not self.score.missing
        return found and (not self.evidence or min(self.score.recall, self.score.parents) >= MIN_SHARE)


class LinkingCampaign:
    """The proxies, which may be killed and restarted, and the traffic through them."""

    def __init__(
        self, folder: Path, vllm: ScriptedVllm, vllm_url: str, workers: int, machines: int, store: str
    ) -> None:
        self._folder = folder
        self._store = store
        self._workers = workers
        self._machines = machines
        self._vllm = vllm
        self._vllm_url = vllm_url
        self._proxies = self._start()

    def _start(self) -> list[ProxyProcess]:
        if self._machines == 1:
            settings = {"upstreams": [self._vllm_url], "workers": self._workers, "store": self._store}
            proxies = [ProxyProcess(self._folder, **settings)]
        else:
            proxies = start_machines(self._folder, self._vllm_url, self._workers, self._machines, store=self._store)
        for proxy in proxies:
            eventually(partial(is_ready, proxy.url), 60)
        return proxies

    async def run(self, kinds: Sequence[TrafficKind], agents: int, seed: int) -> list[LinkingScore]:
        """Send the traffic of all kinds through one proxy; return their scores. Kinds with a restart run last."""
        # With several workers, every call takes a connection of its own, and so any worker.
        connector = aiohttp.TCPConnector(limit=0, force_close=self._workers * self._machines > 1)
        async with aiohttp.ClientSession(connector=connector) as session:
            traffic = LinkingTraffic([proxy.url for proxy in self._proxies], session, random.Random(seed))
            traffic.open.set()
            for kind in kinds:
                if not kind.restart:
                    await self._all(traffic, [kind], agents)
            if restarting := [kind for kind in kinds if kind.restart]:
                running = asyncio.ensure_future(self._all(traffic, restarting, agents))
                await asyncio.sleep(0.1)
                await self._restart(traffic)
                await running
        for proxy in self._proxies:
            eventually(partial(has_shipped, proxy.url))
        return score_kinds(traffic.truths, self._stored(), [kind.name for kind in kinds if kind.alike])

    async def _all(self, traffic: LinkingTraffic, kinds: Sequence[TrafficKind], divisor: int) -> None:
        """Run the agents of these kinds concurrently."""
        running = []
        for kind in kinds:
            agents = max(3, kind.agents // divisor)
            self._vllm.failures_left = agents if "503" in kind.name else 0
            running += [kind.agent(self._agent(traffic, kind, number)) for number in range(agents)]
        await asyncio.gather(*running)

    def _agent(self, traffic: LinkingTraffic, kind: TrafficKind, number: int) -> AgentRun:
        return traffic.run(kind.name, f"{number}{kind.name[0]}{len(kind.name)}", f"key-{number % kind.keys}")

    async def _restart(self, traffic: LinkingTraffic) -> None:
        """Kill and restart the proxies while no call is in flight."""
        traffic.open.clear()
        while traffic.in_flight:
            await asyncio.sleep(0.01)
        for proxy in self._proxies:
            await asyncio.to_thread(proxy.kill)
        self._proxies = await asyncio.to_thread(self._start)
        traffic.urls = [proxy.url for proxy in self._proxies]
        traffic.open.set()

    def _stored(self) -> dict[str, StoredCall]:
        """Return the stored links by call label."""
        store = open_store(self._store)
        calls: list[Call] = []
        while page := store.calls.page(1000, calls[-1].id if calls else None):
            calls += page
        store.close()
        labels = {call.id: call.role or "" for call in calls}
        return {
            labels[call.id]: StoredCall(
                trajectory=call.trajectory_id,
                before=labels.get(call.parent_call or ""),
                choice=call.parent_choice,
                linked_by=call.linked_by,
            )
            for call in calls
        }

    def stop(self) -> None:
        """Stop the proxies."""
        for proxy in reversed(self._proxies):
            proxy.stop()


def measure(
    *, quick: bool = False, seed: int = 1, only: str = "", workers: int = 1, machines: int = 1, database: str = "sqlite"
) -> list[LinkingResult]:
    """Return the result of each kind whose name contains `only`, through proxies with this many workers each.

    `database`: `sqlite`, or `postgresql`, a server of its own.
    """
    kinds = [kind for kind in (*KINDS, *DIALECT_KINDS) if only in kind.name]
    vllm = ScriptedVllm()
    with ExitStack() as stack:
        folder, url = Path(stack.enter_context(tempfile.TemporaryDirectory())), stack.enter_context(served(vllm))
        store = str(folder / "store.db") if database == "sqlite" else stack.enter_context(postgres_server()).url
        campaign = LinkingCampaign(folder, vllm, url, workers, machines, store)
        try:
            linking_scores = asyncio.run(campaign.run(kinds, _QUICK_DIVISOR if quick else 1, seed))
        finally:
            campaign.stop()
    evidence = {kind.name: kind.evidence for kind in kinds}
    return [LinkingResult(score, evidence[score.kind]) for score in linking_scores]
