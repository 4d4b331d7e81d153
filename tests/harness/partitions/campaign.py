"""The campaign: traffic of agents without ids through two machines that fail, and the check of the store.

Each machine has a proxy with workers, and both have a coordinator, of which one decides; or only the first has one. The
store is PostgreSQL, reached over the network. Agents call the machines in turn. Meanwhile workers, coordinators and
whole machines are killed, and the links between the machines, and to the database, are cut. `verdict.py` defines what
must hold once everything is back.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import sqlalchemy as sa

from ratchet.proxy.api_keys import hash_key
from ratchet.store.db import schema
from ratchet.store.db.engine import connect, read
from ratchet.store.records import UNLINKED
from tests.harness.linking.dialects import DIALECT_KINDS
from tests.harness.linking.kinds import KINDS, TrafficKind
from tests.harness.partitions.faults import Faults
from tests.harness.partitions.machines import FailingMachine, make_machines, store_urls
from tests.harness.partitions.network import DATABASE, network
from tests.harness.partitions.traffic import CallRefused, FailureTraffic
from tests.harness.partitions.verdict import KeptCall, judge
from tests.harness.postgres import postgres_server
from tests.harness.proxy.servers import eventually

_KEYS = ("k", *(f"key-{number}" for number in range(8)))
_LEFT_OUT = ("503 and SDK retries",)  # the upstream fails there, which here nothing asks it to
_TRAFFIC = [kind for kind in (*KINDS, *DIALECT_KINDS) if kind.name not in _LEFT_OUT and not kind.restart]
_SETTLE_SECONDS = 120


@dataclass
class PartitionOutcome:
    """Counts of a campaign. `violations` lists broken promises."""

    seed: int
    machines: str
    standby: bool
    kills: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    answered: int = 0
    stored: int = 0
    trajectories: int = 0
    precision: float = 0.0
    recall_where_unmarked: float = 0.0
    share_marked: float = 0.0
    linked_by: dict[str, int] = field(default_factory=dict)
    client_errors: dict[str, int] = field(default_factory=dict)
    slowest_seconds: float = 0.0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class _AgentLoad:
    """Agents of random kinds, on an event loop in a thread, until `stop`; then each ends its run."""

    def __init__(self, urls: list[str], agents: int, seed: int, only: str) -> None:
        self._urls = urls
        self._agents = agents
        self._random = random.Random(seed)
        self._kinds = [kind for kind in _TRAFFIC if only in kind.name]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.traffic: FailureTraffic

    def start(self) -> None:
        """Start the agents."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the agents."""
        self._stop.set()
        self._thread.join(600)
        assert not self._thread.is_alive(), "the agents did not end"

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # every call may meet any worker
        async with aiohttp.ClientSession(connector=connector) as session:
            self.traffic = FailureTraffic(self._urls, session, self._random)
            self.traffic.open.set()
            await asyncio.gather(*(self._agent(number) for number in range(self._agents)))

    async def _agent(self, number: int) -> None:
        runs = 0
        while not self._stop.is_set():
            kind: TrafficKind = self._random.choice(self._kinds)
            runs += 1
            name = f"{number}x{runs}{kind.name[0]}{len(kind.name)}"
            try:
                await kind.agent(self.traffic.run(kind.name, name, f"key-{self._random.randrange(kind.keys)}"))
            except CallRefused:
                continue  # counted


def run(
    folder: Path,
    *,
    kills: int,
    seconds: float,
    seed: int,
    standby: bool,
    workers: int,
    agents: int,
    scale: float,
    only: str,
    fault: str | None = None,
    calm_seconds: float | None = None,
) -> PartitionOutcome:
    """Run a campaign until there were that many kills, and for at least some seconds; `scale` shortens its failures.

    `fault`: only faults of this kind, one at a time. `calm_seconds`: after each.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        links, server = stack.enter_context(network()), stack.enter_context(postgres_server())
        if links.has_links:
            server.listen(links.prefix(DATABASE))
        stores, keys = store_urls(links, server.url), [hash_key(key.encode()) for key in _KEYS]
        machines = make_machines(links, folder, stores, workers, standby=standby, key_hashes=keys)
        for machine in machines:
            stack.callback(machine.remove)
        with ThreadPoolExecutor(2) as threads:  # they wait for each other
            list(threads.map(FailingMachine.start, machines))
        for machine in machines:
            eventually(machine.is_whole, _SETTLE_SECONDS)
        outcome = PartitionOutcome(seed, "network namespaces" if links.has_links else "processes: no cuts", standby)
        load, faults = (
            _AgentLoad([machine.url for machine in machines], agents, seed, only),
            Faults(links, machines, seed, scale, fault, calm_seconds),
        )
        load.start()
        try:
            faults.run(kills, seconds)
        finally:
            faults.undo()
            load.stop()
        for machine in machines:
            eventually(machine.has_shipped, _SETTLE_SECONDS)
        for machine in reversed(machines):
            if (status := machine.stop()) != 0:
                outcome.violations.append(f"{machine.name} ended with status {status}")
        _check(outcome, load.traffic, faults, server.url)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _check(outcome: PartitionOutcome, traffic: FailureTraffic, faults: Faults, url: str) -> None:
    stored = _stored(url)
    names = [kind.name for kind in _TRAFFIC if kind.alike], [kind.name for kind in _TRAFFIC if kind.evidence]
    verdict = judge(traffic.truths, traffic.answered, stored, *names)
    outcome.kills, outcome.cuts = dict(faults.kills), dict(faults.cuts)
    outcome.attempts, outcome.answered, outcome.stored = len(traffic.truths), len(traffic.answered), len(stored)
    outcome.trajectories = len({call.trajectory for call in stored})
    outcome.precision, outcome.recall_where_unmarked = verdict.precision, verdict.recall
    outcome.share_marked = verdict.marked
    for call in stored:
        outcome.linked_by[call.linked_by] = outcome.linked_by.get(call.linked_by, 0) + 1
    outcome.client_errors, outcome.slowest_seconds = dict(traffic.errors), traffic.slowest_seconds
    outcome.violations += [*traffic.refused, *verdict.violations]


def _stored(url: str) -> list[KeptCall]:
    calls, trajectories, engine = schema.calls, schema.trajectories, connect(url)
    query = sa.select(calls, trajectories.c.purpose).join(trajectories, trajectories.c.id == calls.c.trajectory_id)
    with read(engine) as connection:
        rows = connection.execute(query).all()
    engine.dispose()
    labels = {row.id: row.role or "" for row in rows}
    return [
        KeptCall(
            id=row.id,
            label=row.role or "",
            trajectory=row.trajectory_id,
            is_marked=row.purpose == UNLINKED,
            before=labels.get(row.parent_call or ""),
            choice=row.parent_choice,
            state=str(row.state),
            linked_by=row.linked_by,
        )
        for row in rows
    ]
