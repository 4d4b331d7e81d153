"""How well calls are linked into trajectories without any id: precision and recall per kind of adversarial traffic.

A real proxy in its own process, a scripted vLLM behind it, and agents whose truth is known: many at once with equal
prompts, sub-agents, retries, breaks, compaction, edits, several answers, every way of sending an answer back, every
dialect, restarts of the proxy in between. What is meant by the figures stands in `linking_score.py`, the kinds in
`linking_kinds.py` and `linking_dialects.py`. Ends with status 1 where precision or, where the traffic holds evidence,
recall or parents are under 99.9%.

    python -m benchmarks.linking [--quick] [--seed 1] [--only WORD] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import httpx

from benchmarks.linking_dialects import DIALECT_KINDS
from benchmarks.linking_kinds import KINDS, Kind
from benchmarks.linking_score import Score, Stored, scores
from benchmarks.linking_traffic import Run, Traffic
from ratchet.store.records import Call
from ratchet.store.store import open_store
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served

LEAST = 0.999
_QUICK_SHARE = 8  # of the agents, in the quick form


@dataclass
class Result:
    """A score, and whether the traffic says enough to ask for recall."""

    score: Score
    evidence: bool

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        found = self.score.precision >= LEAST and not self.score.missing
        return found and (not self.evidence or min(self.score.recall, self.score.parents) >= LEAST)


class Bench:
    """The proxy, which may be killed and started again, and the traffic through it."""

    def __init__(self, folder: Path, vllm: ScriptedVllm, vllm_url: str) -> None:
        self._folder = folder
        self._vllm = vllm
        self._vllm_url = vllm_url
        self._proxy = self._start()

    def _start(self) -> ProxyProcess:
        proxy = ProxyProcess(self._folder, upstreams=[self._vllm_url])
        eventually(lambda: httpx.get(f"{proxy.url}/health/ready").status_code == 200, 20)
        return proxy

    async def run(self, kinds: Sequence[Kind], agents: int, seed: int) -> list[Score]:
        """Send the traffic of all kinds, into one proxy; return the scores, restarts last."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            traffic = Traffic(self._proxy.url, session, random.Random(seed))
            traffic.open.set()
            for kind in kinds:
                if not kind.restart:
                    await self._all(traffic, [kind], agents)
            if outliving := [kind for kind in kinds if kind.restart]:
                going = asyncio.ensure_future(self._all(traffic, outliving, agents))
                await asyncio.sleep(0.1)
                await self._restart(traffic)
                await going
        eventually(lambda: httpx.get(f"{traffic.url}/health/backlog").json()["unshipped_records"] == 0, 30)
        return scores(traffic.truths, self._stored(), [kind.name for kind in kinds if kind.alike])

    async def _all(self, traffic: Traffic, kinds: Sequence[Kind], share: int) -> None:
        """Send the traffic of these kinds, all agents at once."""
        going = []
        for kind in kinds:
            agents = max(3, kind.agents // share)
            self._vllm.failures_left = agents if "503" in kind.name else 0
            going += [kind.agent(self._agent(traffic, kind, number)) for number in range(agents)]
        await asyncio.gather(*going)

    def _agent(self, traffic: Traffic, kind: Kind, number: int) -> Run:
        return traffic.run(kind.name, f"{number}{kind.name[0]}{len(kind.name)}", f"key-{number % kind.keys}")

    async def _restart(self, traffic: Traffic) -> None:
        """Kill the proxy between two calls of every agent, and start it again."""
        traffic.open.clear()
        while traffic.under_way:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._proxy.kill)
        self._proxy = await asyncio.to_thread(self._start)
        traffic.url = self._proxy.url
        traffic.open.set()

    def _stored(self) -> dict[str, Stored]:
        """Return what the proxy stored, by label."""
        store = open_store(str(self._folder / "store.db"))
        calls: list[Call] = []
        while page := store.calls.page(1000, calls[-1].id if calls else None):
            calls += page
        store.close()
        labels = {call.id: call.role or "" for call in calls}
        return {
            labels[call.id]: Stored(
                trajectory=call.trajectory_id,
                before=labels.get(call.parent_call or ""),
                choice=call.parent_choice,
                linked_by=call.linked_by,
            )
            for call in calls
        }

    def stop(self) -> None:
        """Stop the proxy."""
        self._proxy.stop()


def measure(*, quick: bool = False, seed: int = 1, only: str = "") -> list[Result]:
    """Return the result of each kind whose name holds `only`."""
    kinds = [kind for kind in (*KINDS, *DIALECT_KINDS) if only in kind.name]
    vllm = ScriptedVllm()
    with tempfile.TemporaryDirectory() as folder, served(vllm) as url:
        bench = Bench(Path(folder), vllm, url)
        try:
            found = asyncio.run(bench.run(kinds, _QUICK_SHARE if quick else 1, seed))
        finally:
            bench.stop()
    evidence = {kind.name: kind.evidence for kind in kinds}
    return [Result(score, evidence[score.kind]) for score in found]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the agents")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORD", help="only kinds whose name holds it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    results = measure(quick=options.quick, seed=options.seed, only=options.only)
    if options.json:
        print(json.dumps([asdict(one.score) | {"evidence": one.evidence, "good": one.good} for one in results]))
    else:
        _print(results, time.perf_counter() - began)
    sys.exit(0 if all(one.good for one in results) else 1)


def _print(results: Sequence[Result], seconds: float) -> None:
    print(f"{'kind':26} {'runs':>5} {'found':>6} {'calls':>6} {'precision':>9} {'recall':>8} {'parents':>8}  linked by")
    for one in results:
        score = one.score
        ways = ", ".join(f"{way} {count}" for way, count in sorted(score.linked_by.items(), key=lambda way: -way[1]))
        recall = f"{score.recall:8.2%} {score.parents:8.2%}" if one.evidence else f"({score.recall:.2%}) {'':8}"
        line = f"{score.kind:26} {score.runs:5} {score.trajectories:6} {score.calls:6} {score.precision:9.2%} {recall}"
        print(f"{line}  {ways}{'' if one.good else '   <- BAD'}{f' missing {score.missing}' if score.missing else ''}")
    print(f"{sum(one.score.calls for one in results)} calls, {seconds:.0f} s")


if __name__ == "__main__":
    main()
